# SPDX-License-Identifier: Apache-2.0
"""The rotary embedding that MLA uses gives a token the same rotation alone and in a batch (docs/decisions/0005)."""

import pytest
import torch

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def rope():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from vllm.model_executor.layers.rotary_embedding import get_rope

    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig(compilation_config={"custom_ops": ["all"], "mode": 0})):
        yield get_rope(
            64, max_position=128, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, is_neox_style=False
        )


def rotate(rope, tokens):
    """Query [T, 4, 64] and key [T, 1, 64] as MLA slices them out of wider tensors; returns both for `tokens`."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(3, 576, generator=generator)
    query = torch.randn(3, 4, 96, generator=generator)
    positions = torch.tensor([29, 30, 31])
    chosen = torch.tensor(tokens)
    return rope(positions[chosen], query[chosen][..., 32:], latent[chosen][:, 512:].unsqueeze(1))


def test_a_token_is_rotated_alike_alone_and_in_a_batch(rope):
    batch_query, batch_key = rotate(rope, [0, 1, 2])
    for token in range(3):
        query, key = rotate(rope, [token])
        torch.testing.assert_close(batch_query[token], query[0])
        torch.testing.assert_close(batch_key[token], key[0])


def test_every_head_of_the_query_is_rotated_by_the_definition(rope):
    """Pairs (2i, 2i+1) turn by position * theta^(-2i/64)."""
    query, _ = rotate(rope, [1])
    generator = torch.Generator().manual_seed(0)
    torch.randn(3, 576, generator=generator)
    plain = torch.randn(3, 4, 96, generator=generator)[1][:, 32:]
    angle = 30 * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    even, odd = plain[:, 0::2], plain[:, 1::2]
    want = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1)
    torch.testing.assert_close(query[0], want.flatten(1), rtol=1e-4, atol=1e-4)

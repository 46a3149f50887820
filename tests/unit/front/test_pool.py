# SPDX-License-Identifier: Apache-2.0
"""Which prefill instance is asked."""

from __future__ import annotations

from vllm_ascend_pd.front.pool import (
    GIVE_UP_FAILURES,
    MAX_BACKOFF_S,
    MAX_IMBALANCE_TOKENS,
    PROBE_INTERVAL_S,
    Member,
    MemberState,
    PrefillPool,
)

URLS = [f"http://p{index}:1" for index in range(4)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def healthy_pool(clock: Clock | None = None, urls: list[str] = URLS) -> PrefillPool:
    pool = PrefillPool(urls, clock or Clock())
    for member in pool.members:
        pool.mark_healthy(member, "id", "e1")
    return pool


def chosen(pool: PrefillPool, seed: int) -> Member:
    member = pool.choose([seed] * 40)
    assert member is not None
    return member


def test_nobody_is_chosen_before_a_handshake() -> None:
    assert PrefillPool(URLS).choose([1]) is None


def test_one_prompt_always_goes_to_the_same_member() -> None:
    assert len({chosen(healthy_pool(), 7).url for _ in range(5)}) == 1


def test_prompts_with_one_head_share_a_member() -> None:
    pool, head = healthy_pool(), list(range(256))
    assert len({pool.choose(head + [seed]).url for seed in range(20)}) == 1  # type: ignore[union-attr]


def test_other_prompts_spread_over_all_members() -> None:
    pool = healthy_pool()
    assert {chosen(pool, seed).url for seed in range(100)} == set(URLS)


def test_a_lost_member_moves_only_its_own_prompts() -> None:
    pool = healthy_pool()
    before = {seed: chosen(pool, seed).url for seed in range(100)}
    lost = pool.members[0]
    pool.mark_dead(lost, "gone")
    after = {seed: chosen(pool, seed).url for seed in range(100)}
    assert lost.url not in after.values()
    assert all(after[seed] == url for seed, url in before.items() if url != lost.url)


def test_the_order_of_the_urls_does_not_matter() -> None:
    """F71: members are never paired with anything by position."""
    there, back = healthy_pool(), healthy_pool(urls=URLS[::-1])
    assert all(chosen(there, seed).url == chosen(back, seed).url for seed in range(50))


def test_a_long_queue_beats_a_warm_prefix() -> None:
    pool = healthy_pool()
    favourite = chosen(pool, 7)
    pool.start_ask(favourite, MAX_IMBALANCE_TOKENS, list)
    assert chosen(pool, 7) is favourite
    pool.start_ask(favourite, 1, list)
    assert chosen(pool, 7) is not favourite
    pool.end_ask(favourite, 1, list)
    assert chosen(pool, 7) is favourite


def test_those_to_avoid_are_taken_only_when_nobody_else_is_left() -> None:
    pool = healthy_pool()
    favourite = chosen(pool, 7)
    second = pool.choose([7] * 40, {favourite.url})
    assert second is not favourite
    assert pool.choose([7] * 40, set(URLS)) is favourite


def test_a_dead_member_is_probed_with_a_back_off_that_doubles_to_a_limit() -> None:
    clock = Clock()
    pool = healthy_pool(clock, URLS[:1])
    (member,) = pool.members
    waits = []
    for _ in range(8):
        pool.mark_dead(member, "no")
        waits.append(member.probe_at_s - clock.now_s)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_one_answer_ends_the_back_off() -> None:
    clock = Clock()
    pool = healthy_pool(clock, URLS[:1])
    (member,) = pool.members
    pool.mark_dead(member, "no")
    pool.mark_dead(member, "no")
    pool.mark_healthy(member, "id", "e2")
    assert (member.state, member.epoch, member.detail) == (MemberState.HEALTHY, "e2", "")
    pool.mark_dead(member, "no")
    assert member.probe_at_s == clock.now_s + 1


def test_members_fall_due_at_their_own_times() -> None:
    clock = Clock()
    pool = healthy_pool(clock, URLS[:3])
    dead, refused, fine = pool.members
    pool.mark_dead(dead, "no")
    pool.mark_refused(refused, "no")
    assert pool.get_due() == []
    clock.now_s += 1
    assert pool.get_due() == [dead]
    clock.now_s += PROBE_INTERVAL_S
    assert pool.get_due() == [dead, fine]
    clock.now_s += MAX_BACKOFF_S
    assert pool.get_due() == [dead, refused, fine]


def test_a_refused_member_is_not_asked() -> None:
    pool = healthy_pool(urls=URLS[:1])
    pool.mark_refused(pool.members[0], "dtype differs")
    assert pool.choose([1]) is None
    assert pool.num_healthy == 0


def test_asks_at_a_member_that_stays_silent_are_given_up() -> None:
    pool = healthy_pool(urls=URLS[:1])
    (member,) = pool.members
    given_up: list[int] = []
    give_up = lambda: given_up.append(1)  # noqa: E731
    pool.start_ask(member, 5, give_up)
    for _ in range(GIVE_UP_FAILURES - 1):
        pool.mark_dead(member, "no")
    assert not given_up
    pool.mark_dead(member, "no")
    assert given_up == [1]


def test_a_name_that_resolves_anew_keeps_busy_members_until_they_are_idle() -> None:
    pool = healthy_pool(urls=URLS[:2])
    busy, idle = pool.members
    pool.start_ask(busy, 5, list)
    pool.set_urls([URLS[2]])
    assert [member.url for member in pool.members] == [busy.url, URLS[2]]
    assert idle not in pool.members
    pool.end_ask(busy, 5, list)
    pool.set_urls([URLS[2]])
    assert [member.url for member in pool.members] == [URLS[2]]

# SPDX-License-Identifier: Apache-2.0
"""Does a prefill/decode pair answer with the same tokens as one aggregated server?

    python examples/compare_servers.py http://DECODE:8000 --with http://AGGREGATED:9000
    python examples/compare_servers.py http://AGGREGATED:9000 --save answers.json     # where both do not fit at a time
    python examples/compare_servers.py http://DECODE:8000 --with answers.json

Greedy completions of prompts of many lengths (token ids from a fixed seed, around multiples of the block size), one by
one and then all at once. Needs the standard library only. Exit status: 0 all the same, 1 not, 2 nothing compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LENGTHS = "1,2,15,16,17,31,32,33,127,128,129,255,256,257,1000,2000,4000"
TIMEOUT_S = 600.0
FIRST_ID, LAST_ID = 1000, 9999  # in every vocabulary, and no special token of any


def request(url: str, body: dict[str, Any] | None = None) -> Any:
    """A GET, or a POST of JSON; the decoded answer. Raises OSError."""
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def make_prompts(lengths: list[int], seed: int) -> dict[str, list[int]]:
    """Prompts by their length, and two with a common head: the second one meets a warm prefix cache."""
    chance = random.Random(seed)
    prompts = {str(n): [chance.randint(FIRST_ID, LAST_ID) for _ in range(n)] for n in lengths}
    head = prompts[str(max(lengths))]
    prompts["head+40"] = head + [chance.randint(FIRST_ID, LAST_ID) for _ in range(40)]
    return prompts


def ask(url: str, model: str, prompt: list[int], max_tokens: int) -> list[int] | str:
    """The answer's token ids, or what went wrong."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    try:
        choice = request(f"{url}/v1/completions", body)["choices"][0]
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}"
    except OSError as error:
        return f"no answer: {error}"
    return list(choice["token_ids"])


def ask_all(url: str, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, list[int] | str]:
    """Each prompt alone, then all at once."""
    url = url.rstrip("/")
    model = request(f"{url}/v1/models")["data"][0]["id"]
    answers = {name: ask(url, model, prompt, max_tokens) for name, prompt in prompts.items()}
    with ThreadPoolExecutor(len(prompts)) as pool:
        tasks = {name: pool.submit(ask, url, model, prompt, max_tokens) for name, prompt in prompts.items()}
    return answers | {f"{name}, all at once": task.result() for name, task in tasks.items()}


def show_moved(url: str) -> None:
    """What a decode instance says of its transfers; nothing of a server without a role."""
    try:
        totals = request(f"{url.rstrip('/')}/pd/status").get("totals", {})
    except OSError:
        return
    names = ("transfers", "transfers_empty", "tokens_loaded_remotely", "bytes_pulled", "failures")
    print(f"{url}: " + ", ".join(f"{name} {totals.get(name)}" for name in names))


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Print one line per prompt; the exit status."""
    failed = 0
    for name, answer in ours.items():
        other = theirs.get(name, "not asked")
        same = answer == other and isinstance(answer, list)
        failed += not same
        print(f"{'same' if same else 'DIFFERENT':<10} prompt {name}")
        if not same:
            print(f"           here  {answer}\n           there {other}")
    print(f"{len(ours) - failed} of {len(ours)} the same")
    return 1 if failed else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", help="HTTP address of a server")
    parser.add_argument("--with", dest="other", metavar="URL|FILE", help="compare with this server, or saved answers")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the answers here")
    parser.add_argument("--lengths", default=LENGTHS, help="prompt lengths in tokens (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    options = parser.parse_args()
    prompts = make_prompts([int(word) for word in options.lengths.split(",")], options.seed)
    try:
        answers = ask_all(options.url, prompts, options.max_tokens)
        if options.save is not None:
            options.save.write_text(json.dumps(answers))
        if options.other is None:
            return 0
        is_url = options.other.startswith(("http://", "https://"))
        others = (
            ask_all(options.other, prompts, options.max_tokens)
            if is_url
            else json.loads(Path(options.other).read_text())
        )
    except (OSError, ValueError) as error:
        print(f"nothing was compared: {error}", file=sys.stderr)
        return 2
    status = compare(answers, others)
    show_moved(options.url)
    return status


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
import pytest

from tools.size_limits import find_problems


@pytest.fixture
def write(tmp_path):
    (tmp_path / "tools").mkdir()

    def write(text):
        (tmp_path / "tools/a.py").write_text(text)
        return tmp_path

    return write


def long_function(num_lines):
    return "class A:\n    def f(self):\n" + "        x = 1\n" * (num_lines - 1)


def test_what_is_within_the_limits_is_no_problem(write):
    assert find_problems(write(long_function(60) + "x = 1\n" * 339), {}) == []


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("x = 1\n" * 401, "tools/a.py", "401 lines"),
        (long_function(61), "tools/a.py:A.f", "61 lines"),
        ("def f(a, b, c, d, e, f, *, g, h): pass\n", "tools/a.py:f", "8 parameters"),
        ("if 1:\n    async def f(a, b, c, d, e, f, g, h): pass\n", "tools/a.py:f", "8 parameters"),
    ],
)
def test_an_excess_is_named_unless_a_reason_is_written(write, text, key, said):
    (problem,) = find_problems(write(text), {})
    assert key in problem
    assert said in problem
    assert find_problems(write(text), {key: "because"}) == []
    assert len(find_problems(write(text), {key: ""})) == 1, "an empty reason is none"


def test_self_is_not_counted(write):
    assert find_problems(write("class A:\n    def f(self, a, b, c, d, e, f, g): pass\n"), {}) == []


def test_a_reason_that_is_not_needed_any_more_is_a_problem(write):
    (problem,) = find_problems(write("x = 1\n"), {"tools/a.py": "because"})
    assert "remove it" in problem

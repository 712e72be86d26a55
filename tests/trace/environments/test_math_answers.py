r"""Answers that a mathematician has judged by hand, beside the verdict of the checker.

The expected value is the mathematician's. Where math-verify decides otherwise the pair stands in DIFFERENT,
with what it says, so that a release that changes its mind is noticed.
"""

from __future__ import annotations

import pytest

from trace_rl.environments.math_check import MathChecker

CORRECT = [  # (answer, gold)
    ("5", "5"),
    (r"\boxed{5}", "5"),
    (r"The sum is $\boxed{5}$.", "5"),
    (r"First \boxed{4}, but no: \boxed{5}", "5"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    ("5.", "5"),
    ("073", "73"),
    ("73", "073"),
    ("27.0", "27"),
    ("27", "27.0"),
    ("0.5", r"\frac{1}{2}"),
    (r"\dfrac12", r"\frac{1}{2}"),
    (r"\tfrac{2}{4}", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"\frac{7}{3}", r"2\frac{1}{3}"),
    (r"50\%", r"\frac{1}{2}"),
    ("50%", "0.5"),
    ("1,234", "1234"),
    ("10080", r"10{,}080"),
    ("36000", r"\$36{,}000"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"-6 + 3\sqrt3", r"3\sqrt{3} - 6"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\pi \cdot 2", r"2\pi"),
    ("x = 5", "5"),
    ("5", "x=5"),
    ("y = 3 + 2x", "y = 2x + 3"),
    ("(x-1)(x+1)", "x^2-1"),
    ("3i + 2", "2+3i"),
    ("[0, 1)", "[0,1)"),
    (r"x \in [-2, 7]", "[-2,7]"),
    (r"x \le 2", r"(-\infty, 2]"),
    (r"\{3, 1, 2\}", r"\{1,2,3\}"),
    ("3, 2, 1", r"\{1,2,3\}"),
    ("2, -2", r"\pm 2"),
    ("6, 7", r"6 \text{ and } 7"),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"5\text{ cm}", "5"),
    ("10", r"10\text{ inches}"),
    ("90", r"90^\circ"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\text{(C)}", "C"),
    (r"\emptyset", r"\{\}"),
    (r"\infty", r"\infty"),
]
WRONG = [
    ("6", "5"),
    ("-5", "5"),
    ("27.5", "27"),
    ("37", "73"),
    (r"\boxed{5} or rather \boxed{4}", "5"),
    ("4 or 5", "5"),
    ("4, 5", "5"),
    (r"\{1, 2, 3, 4, 5\}", "5"),
    ("6", r"3\sqrt{3} - 6"),
    ("0.33", r"\frac{1}{3}"),
    ("15.5563", r"11\sqrt{2}"),
    ("y = 5", "x = 5"),
    ("x^2 = 25", "5"),
    ("(0, 1)", "[0,1)"),
    ("(2, 1)", "(1, 2)"),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\text{Alice}", r"\text{Evelyn}"),
    (r"\text{on}", r"\text{no}"),
    ("(B)", r"\text{(C)}"),
    ("0.0000001", "0"),
    ("x", "5"),
    ("I do not know", "5"),
    (r"\boxed{}", "5"),
    ("", "5"),
    (r"\text{5}, \text{6}", "5"),
    (r"\infty", "5"),
    (r"\frac{0}{0}", "5"),
]
EQUATIONS = ["x^2+1=0", "x^2+x+1=0", "x^2+2x+5=0", "x^4=-4", "|x|+|y|=1"]
NOTHING = ["0=0", "0=1", "1=2", "x=x", "x+1=x", "z^2=-1", "|x|=-1", "1<2"]
SMALL = [  # (answer, gold, equal)
    ("0.0", "10^{-9}", False),
    ("0.0", r"\frac{1}{10000000}", False),
    ("3^{-100}", "2^{-100}", False),
    ("e^{-101}", "e^{-100}", False),
    (r"1.0 \cdot 10^{-34}", r"6.6\cdot10^{-34}", False),
    ("x = 0.0", "x = 10^{-34}", False),
    ("(1, 0.0)", "(1, 10^{-9})", False),
    ("0.0001", r"\frac{1}{10000}", True),
    (r"6.6 \cdot 10^{-34}", r"\frac{66}{10^{35}}", True),
    ("4^{-50}", "2^{-100}", True),
    (r"0.01\%", "0.0001", True),
]
LETTERS = [
    ("BAC", "ABC", False),
    (r"\text{BAC}", "ABC", False),
    ("cba", r"\text{abc}", False),
    ("ABC", "ABC", True),
    (r"\text{ABC}", "ABC", True),
    ("ABC", r"\text{ABC}", True),
    (r"\mathrm{yes}", r"\text{yes}", True),
    ("yx", "xy", True),  # a product
]
DIFFERENT = [  # (answer, gold, the mathematician's verdict, math-verify's)
    (r"50\%", "50", False, True),  # it lets a percent sign go where the other side is a whole number
    ("50", r"50\%", False, True),
    ("0.333333", r"\frac{1}{3}", False, True),  # it rounds decimals to six places
    ("6.283185", r"2\pi", False, True),
    ("4210_7", "4210_5", False, True),  # it ignores the base
    ("9", r"9\%", False, True),
    (r"9\%", "9", False, True),
    ("(2,1)", "1,2", False, True),  # to a set it compares a tuple without its order
    ("on", "no", False, True),  # bare small letters are a product, and products commute
    ("1", "2 1/3", False, True),  # it reads mixed numbers only with \frac
    (r"\frac{7}{3}", "2 1/3", True, False),
    (r"\frac{\pi}{3}", r"60^\circ", True, False),  # it drops the degree sign
    ("The answer is 5", "5", True, False),  # prose is no mathematics: the box is asked for
]


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker(seconds=30.0, workers=1)
    yield checker
    checker.close()


@pytest.mark.parametrize(("answer", "gold"), CORRECT)
def test_correct_answers(checker, answer, gold):
    assert checker.check(answer, [gold]).correct


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_wrong_answers(checker, answer, gold):
    assert not checker.check(answer, [gold]).correct


@pytest.mark.parametrize("gold", EQUATIONS)
def test_equations_without_solutions_do_not_equal_each_other(checker, gold):
    assert [answer for answer in NOTHING if checker.check(answer, [gold]).correct] == []
    assert checker.check(gold, [gold]).correct


def test_equations_with_the_same_solutions_are_equal(checker):
    assert checker.check("2x + 2y = 4", ["x + y = 2"]).correct
    assert checker.check("x^2 + 2x = -5", ["x^2+2x+5=0"]).correct
    assert checker.check("1 + 4 = 5", ["5"]).correct


def test_a_statement_on_no_unknown_is_no_set(checker):
    assert not checker.check("1<5<42", [r"\emptyset"]).correct
    assert not checker.check("0<1", [r"(-\infty, \infty)"]).correct


@pytest.mark.parametrize(("answer", "gold", "equal"), SMALL)
def test_small_numbers_are_compared_by_their_size(checker, answer, gold, equal):
    assert checker.check(answer, [gold]).correct == equal


@pytest.mark.parametrize(("answer", "gold", "equal"), LETTERS)
def test_rows_of_letters_have_an_order(checker, answer, gold, equal):
    assert checker.check(answer, [gold]).correct == equal


@pytest.mark.parametrize(("answer", "gold", "right", "by_library"), DIFFERENT)
def test_known_differences(checker, answer, gold, right, by_library):
    assert right != by_library
    assert checker.check(answer, [gold]).correct == by_library


def test_one_of_several_golds_is_enough(checker):
    assert checker.check("1/2", ["7", "0.5"]).correct
    assert checker.check("1/2", ["7", "0.5"]).reason == "equal to 0.5"
    assert not checker.check("1/2", ["7", "8"]).correct
    assert not checker.check("1/2", []).correct

"""The retrieval benchmark on a small folder of records: its rows, and what its two figures count."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.retrieval_sets import (
    ANSWERABLE,
    BAMBOOGLE,
    NQ,
    OWN_PARAGRAPHS,
    WIDER,
    gold_titles,
    holds_an_answer,
)
from trace_rl.tasks.task import Passage, Task

ROOT = Path(__file__).resolve().parents[2]
TASK = Task("1", "Who?", ("The U.S.", "Ed Wood"), "test", ("A", "B"))


def test_figures() -> None:
    a, b, other = Passage("1", "A", ""), Passage("2", "B", ""), Passage("3", "C", "of ed  wood.")
    assert [gold_titles(TASK, found) for found in ([], [other], [a, a], [b, other, a])] == [
        0.0,
        0.0,
        0.5,
        1.0,
    ]
    assert holds_an_answer(TASK, [a, other]) == 1.0
    assert holds_an_answer(TASK, [Passage("4", "Wood", "us")]) == 1.0
    assert holds_an_answer(TASK, [a, Passage("4", "Ed Woods", "status")]) == 0.0


def hotpot(number: int, titles: tuple[str, str]) -> dict[str, Any]:
    return {
        "_id": f"q{number}",
        "type": "bridge",
        "question": f"who made the {titles[0]}",
        "answer": "x",
        "supporting_facts": [[titles[0], 0], [titles[1], 0]],
        "context": [[title, [f"{title} was made."]] for title in titles],
        "evidences": [],
    }


def musique(number: int) -> dict[str, Any]:
    paragraphs = [
        {"idx": i, "title": title, "paragraph_text": f"{title} text", "is_supporting": i == 0}
        for i, title in enumerate(("harbour", "river"))
    ]
    steps = [{"id": 1, "question": "q", "answer": "x", "paragraph_support_idx": 0}]
    question = {"question": "where is the harbour", "answer": "x", "answer_aliases": [], "answerable": True}
    return {"id": f"2hop__{number}", "paragraphs": paragraphs, "question_decomposition": steps, **question}


def write_records(folder: Path) -> None:
    """Each set in its format: the first question finds both of its titles, the second one of two."""
    records: dict[str, Any] = {}
    for kind, file in OWN_PARAGRAPHS:
        two = [hotpot(1, ("tower made", "tower")), hotpot(2, ("bridge", "violin"))]
        records[file] = [musique(1)] if kind == "musique" else two
    records[WIDER[1]] = [{"title": "bridge", "text": "another text"}]
    corpus = [{"id": "0", "contents": '"Moon"\nof ed wood'}]
    for questions, passages in (BAMBOOGLE, NQ):
        asked = [("test_0", "moon", "Ed Wood"), ("test_1", "moon", "nobody")]
        records[questions] = [
            {
                "id": name,
                "question": question,
                "golden_answers": [answer],
                "data_source": "nq",
                "prompt": [{"role": "user", "content": question}],
                "ability": "fact-reasoning",
                "reward_model": {"ground_truth": {"target": [answer]}, "style": "rule"},
                "extra_info": {"index": number, "split": "test"},
            }
            for number, (name, question, answer) in enumerate(asked)
        ]
        records[passages] = corpus
    records[ANSWERABLE] = {"public": ["test_0"]}
    for name, value in records.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        lines = (
            "".join(json.dumps(record) + "\n" for record in value)
            if name.endswith("l")
            else json.dumps(value)
        )
        file.write_text(lines)


def test_on_records(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data")
    options = (
        "--data",
        str(tmp_path / "data"),
        "--quick",
        "--passages",
        "60",
        "--json",
        str(tmp_path / "rows.json"),
    )
    command = [sys.executable, "-m", "bench", "retrieval", "--device", "cpu", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    methods = {row["method"] for row in rows}
    assert methods == {"in memory", "on disk"}
    figures = {
        method: {
            row["workload"].split(",")[0] + (" answerable" if "answerable" in row["workload"] else ""): [
                *row["figures"].values()
            ]
            for row in rows
            if row["method"] == method and row["phase"] == "search" and row["figures"]
        }
        for method in methods
    }
    assert figures["on disk"] == figures["in memory"]
    own = {Path(file).stem: [0.75, 0.5] for kind, file in OWN_PARAGRAPHS if kind != "musique"}
    assert {name: figures["on disk"][name] for name in own} == own
    assert figures["on disk"]["musique_ans_public"] == [1.0, 1.0]
    assert figures["on disk"]["bamboogle_public"] == [0.5, 0.5]
    assert figures["on disk"]["bamboogle_public answerable"] == [1.0, 1.0]
    assert {row["phase"] for row in rows if row["workload"].startswith("60 passages")} == {
        "build",
        "search",
        "all, 8 threads",
    }


def test_a_folder_without_the_records(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench",
        "retrieval",
        "--device",
        "cpu",
        "--quick",
        "--data",
        str(tmp_path),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert "bench retrieval: no record file at" in result.stderr
    assert "Traceback" not in result.stderr

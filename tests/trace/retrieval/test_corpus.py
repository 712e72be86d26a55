"""The corpus file: what is read, and what is refused by line and field."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.retrieval import corpus as corpus_module
from trace_rl.retrieval.contents import join_contents, split_contents
from trace_rl.retrieval.corpus import load_corpus_jsonl, read_corpus
from trace_rl.tasks.records import RecordError
from trace_rl.tasks.task import Passage


def write(tmp_path, *lines):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_corpus(tmp_path):
    path = write(
        tmp_path,
        {"id": "a", "contents": '"Ed Wood"\nA film.\nBy Burton.'},
        {"id": 7, "contents": "Citigroup\nwas formed"},
        {"id": "c", "contents": '""Quoted" twice"\ntext'},
        {"id": "d", "contents": "Empty\n"},
    )
    assert load_corpus_jsonl(path) == [
        Passage("a", "Ed Wood", "A film.\nBy Burton."),
        Passage("7", "Citigroup", "was formed"),
        Passage("c", '"Quoted" twice', "text"),
        Passage("d", "Empty", ""),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"contents": "T\nx"}, "field 'id': missing"),
        ({"id": None, "contents": "T\nx"}, "field 'id': expected a string, got null"),
        ({"id": True, "contents": "T\nx"}, "field 'id'"),
        ({"id": "b"}, "field 'contents': missing"),
        ({"id": "b", "contents": 4}, "field 'contents': expected a string"),
        ({"id": "b", "contents": "no line break"}, "field 'contents': no newline"),
        ({"id": "a", "contents": "T\nx"}, "field 'id': \"a\" occurs twice"),
        ("[1, 2]", "expected a JSON object, got a list"),
        ('{"id": "b", ', "not valid JSON"),
    ],
)
def test_malformed_corpus(line, message, tmp_path):
    path = write(tmp_path, {"id": "a", "contents": "T\nx"}, line)
    with pytest.raises(RecordError) as caught:
        load_corpus_jsonl(path)
    assert "record 1" in str(caught.value)
    assert message in str(caught.value)


def test_missing_corpus(tmp_path):
    with pytest.raises(FileNotFoundError, match="no record file"):
        load_corpus_jsonl(tmp_path / "none.jsonl")


def test_a_list_of_titles_and_texts(tmp_path):
    """The form of HippoRAG's corpora, as a list and as lines."""
    records = [{"title": "Alû", "text": "A demon.\n"}, {"title": "Moon", "text": ""}]
    records.append({"id": "x", "title": "T", "text": "x"})
    expected = [Passage("0", "Alû", "A demon."), Passage("1", "Moon", ""), Passage("x", "T", "x")]
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps(records, indent=4))
    assert load_corpus_jsonl(listed) == expected
    assert load_corpus_jsonl(write(tmp_path, *records)) == expected
    listed.write_text(json.dumps([*records, {"title": "T", "text": None}]))
    with pytest.raises(RecordError, match=r"record 3.*'text': expected a string, got null"):
        load_corpus_jsonl(listed)


def test_half_surrogates_are_replaced(tmp_path):
    path = write(tmp_path, {"id": "a\ud83e", "contents": "T\udc00 \U0001f600\nx\ud83e"})
    assert load_corpus_jsonl(path) == [Passage("a\ufffd", "T\ufffd \U0001f600", "x\ufffd")]


def test_a_line_too_long_to_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_LINE_BYTES", 50)
    path = write(tmp_path, {"id": "a", "contents": "T\nx"}, {"id": "b", "contents": "T\n" + "x" * 60})
    with pytest.raises(RecordError, match="record 1: line longer than 50 bytes"):
        load_corpus_jsonl(path)


@pytest.mark.parametrize("line", ["[" * 100_000, "9" * 5000, "\u0000"])
def test_lines_that_json_chokes_on(line, tmp_path):
    with pytest.raises(RecordError, match=r"record 1: (not valid JSON|expected a JSON object)"):
        load_corpus_jsonl(write(tmp_path, {"id": "a", "contents": "T\nx"}, line))


def test_reading_on_from_any_line(tmp_path):
    path = write(tmp_path, *({"id": i, "contents": f"T\nü{i}"} for i in range(6)))
    lines = list(read_corpus(path))
    for i, line in enumerate(lines):
        assert list(read_corpus(path, offset=line.end, line=line.record.index + 1)) == lines[i + 1 :]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(str.strip)


@given(title=TEXT.map(lambda t: "".join(t.splitlines()).strip()), text=TEXT)
def test_contents_there_and_back(title, text):
    assert split_contents(join_contents(Passage("1", title, text))) == (title, text)

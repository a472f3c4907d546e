"""`lmrl report`: one HTML page that compares runs."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch

from lmrl.cli import ReportConfig, main, parse
from lmrl.figures.trainer import metric_curve
from lmrl.report import answer_rows, curve_names, read_run, read_runs, report_page, setting_rows
from lmrl.signal import interval_over_problems


def make_run(folder, rewards, beta=0.0, answers=("1", "2"), **metrics):
    """The folder of a run with these rewards and ``answers`` before and after, the second being right."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"seed": 0, "beta": beta, "num_eval_generations": 2}))
    lines = [
        {"step": i + 1, "reward": reward, "seconds": 90.0, "entropy": 1.0, **metrics}
        for i, reward in enumerate(rewards)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"when": when, "prompt": f"{i}+1=", "completion": text, "reward": float(text == "2"), "truncated": False}
        for when, text in zip(("before", "after"), answers, strict=True)
        for i in range(3)
        for _ in range(2)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return str(folder)


class Page(HTMLParser):
    """What a page holds: its tags with their attributes, and its text; HTML that does not close what it opens raises."""

    VOID = {"meta", "img", "line", "link", "br"}
    OPTIONAL = {"th", "td", "tr"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID | self.OPTIONAL:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.OPTIONAL:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def two_runs(tmp_path):
    first = make_run(tmp_path / "a", [0.25, 0.5], answers=("1", "<b>2</b>"))
    return first, make_run(tmp_path / "b", [0.5, 1.0, 0.75], beta=0.1, kl_ref=0.01)


@pytest.fixture
def two(tmp_path):
    return two_runs(tmp_path)


def test_one_page_without_a_link_compares_two_runs(two, tmp_path, capsys):
    output = tmp_path / "page.html"
    assert main(["report", *two, "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"report: {output}\n"
    source = output.read_text()
    page = Page(source)
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert "url(" not in source and "@import" not in source and "<script" not in source
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    captions = ["reward", "pass@1", "entropy", "kl_ref", "seconds"]
    assert [attributes["alt"].split()[0] for tag, attributes in page.tags if tag == "img"] == captions
    assert f"a 2 {interval(0)} {interval(0)} 0.375 3.0 min" in page.text
    assert f"b 3 {interval(0)} {interval(1)} 0.750 4.5 min" in page.text


def interval(share):
    return str(interval_over_problems(torch.full((3,), float(share))))


def test_runs_of_one_name_are_told_apart_and_a_run_that_is_named_twice_is_one(tmp_path):
    folders = [make_run(tmp_path / place, [0.5]) for place in ("a/A", "z/A", "z/B")]
    assert [run.name for run in read_runs([*folders, f"{folders[0]}/."])] == ["a/A", "z/A", "z/B"]
    assert [run.name for run in read_runs(folders[1:])] == ["A", "B"]


def test_what_a_model_wrote_is_text_and_no_html(two):
    source = report_page([read_run(two[0])])
    assert "&lt;b&gt;2&lt;/b&gt;" in source and "<b>2</b>" not in source


def test_settings_that_differ_come_first_and_are_marked(tmp_path):
    runs = [read_run(folder) for folder in two_runs(tmp_path)]
    assert setting_rows(runs) == [
        ("beta", ["0.0", "0.1"], True),
        ("seed", ["0", "0"], False),
        ("num_eval_generations", ["2", "2"], False),
    ]
    marked = re.findall(r'<tr class="differs"><td><code>(\w+)</code>', report_page(runs))
    assert marked == ["beta", "beta"]  # in the short table, and among all
    runs[1].settings.pop("seed")  # of an older version
    assert setting_rows(runs)[:2] == [("seed", ["0", "–"], True), ("beta", ["0.0", "0.1"], True)]


def test_curves_are_those_that_some_run_logged(two):
    runs = [read_run(folder) for folder in two]
    assert curve_names(runs) == ["reward", "pass@1", "entropy", "kl_ref", "seconds"]
    assert runs[1].curve("reward") == ([1, 2, 3], [0.5, 1.0, 0.75])
    assert runs[0].curve("kl_ref") == ([], [])


def test_pass_at_1_is_measured_before_at_every_save_and_after(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.5, 0.6], eval_pass_at_1=0.5))
    assert run.curve("pass@1") == ([0, 1, 2, 2], [0.0, 0.5, 0.5, 1.0])


def test_answers_to_the_same_problem_before_and_after(two):
    first, second = answer_rows(read_run(two[1]), 2)
    assert first == {"prompt": "0+1=", "before": [("1", "2 ×, reward 0")], "after": [("2", "2 ×, reward 1")]}
    assert second["prompt"] == "1+1=" and len(answer_rows(read_run(two[1]), 99)) == 3


def test_a_prompt_that_is_held_out_twice_is_two_problems(tmp_path):
    folder = make_run(tmp_path / "a", [0.5])
    rows = [
        {"when": "after", "prompt": prompt, "completion": str(reward), "reward": reward, "truncated": False}
        for prompt, reward in (("1+1=", 1.0), ("1+1=", 0.0), ("2+1=", 1.0))
        for _ in range(2)
    ]
    (tmp_path / "a" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(folder)
    assert run.pass_at_1("after") == interval_over_problems(torch.tensor([1.0, 0.0, 1.0]))
    assert [row["prompt"] for row in answer_rows(run, 8)] == ["1+1=", "1+1=", "2+1="]


def test_a_run_that_goes_on_or_was_killed_is_shown_as_far_as_it_came(two, tmp_path):
    (tmp_path / "a" / "samples.jsonl").unlink()
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    page = Page(report_page([read_run(two[0])]))
    assert "a 2 – – 0.375" in page.text and "There are none yet." in page.text


def picture(values):
    axis = metric_curve({"0": (list(range(1, len(values) + 1)), values)}).axes[0]
    axis.figure.canvas.draw()
    return axis.get_ylim(), axis.get_title("right"), axis.yaxis.get_offset_text().get_text()


def test_one_step_far_outside_does_not_flatten_the_curve_and_is_named():
    (low, high), words, _ = picture([0.1, 0.2] * 150)
    assert low < 0.1 and 0.2 < high < 0.25 and words == ""
    assert picture([0.1, 0.2] * 150 + [0.25])[1] == ""  # not far
    (low, high), words, _ = picture([0.1, 0.2] * 150 + [6.0] + [0.1, 0.2] * 20)
    assert 0.5 < high < 0.6 and words == "single steps reach 6"  # the mean over 15 steps that hold it is 0.54
    assert picture([0.1, 0.2, 6.0])[0][1] > 6 and picture([0.1, 0.2, math.nan])[0][1] < 0.25


@pytest.mark.parametrize("values", [[1 - 1e-7, 1 + 1e-7] * 30, [1 - 2e-11, 1 - 1e-11] * 30, [2.0] * 60])
def test_rounding_is_not_blown_up_and_an_axis_has_no_offset(values):
    (low, high), _, offset = picture(values)
    assert high - low >= 1.9e-4 and "+" not in offset


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path):
    run = read_run(make_run(tmp_path / "a", [0.5, 0.6], kl_ref=None))
    assert all(math.isnan(value) for value in run.curve("kl_ref")[1])
    report_page([run])


def test_a_later_measurement_is_on_the_page(two, tmp_path):
    (tmp_path / "a" / "eval-1").mkdir()
    results = {"pass@1": [0.5, 0.4, 0.6], "pass@2": [0.75, 0.7, 0.8], "reward": 0.5}
    (tmp_path / "a" / "eval-1" / "eval.json").write_text(
        json.dumps({"results": results, "model": "a/checkpoint (step 2)"})
    )
    (tmp_path / "b" / "eval-1").mkdir()
    older = {"results": {"pass@1": [0, 0, 0.1]}, "settings": {"model": "b/checkpoint"}}
    (tmp_path / "b" / "eval-1" / "eval.json").write_text(json.dumps(older))
    text = Page(report_page([read_run(folder) for folder in two])).text
    assert "a/eval-1 pass@1 pass@2 a/checkpoint (step 2) 0.500 [0.400, 0.600] 0.750 [0.700, 0.800]" in text
    assert "b/eval-1 pass@1 b/checkpoint 0.000 [0.000, 0.100]" in text


def test_prompts_that_are_conversations(tmp_path):
    folder = make_run(tmp_path / "a", [0.5])
    turns = [{"role": "user", "content": "1+1?"}]
    row = {"when": "after", "prompt": turns, "completion": "2", "reward": None, "truncated": True}
    (tmp_path / "a" / "samples.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    rows = answer_rows(read_run(folder), 8)
    assert rows == [{"prompt": "[user] 1+1?", "before": [], "after": [("2", "2 ×, not gradable, cut off")]}]
    report_page([read_run(folder)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs the folder of a run"),
        (["nowhere"], "nowhere is not the folder of a run"),
        (["a", "--outptu", "x.html"], "did you mean output?"),
        (["empty"], "empty has no step yet"),
        (["faulty"], "metrics.jsonl, line 2 is not a record of metrics"),
    ],
)
def test_what_cannot_be_compared_is_one_line(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [0.5])
    make_run(tmp_path / "empty", [])
    make_run(tmp_path / "faulty", [0.5])
    with (tmp_path / "faulty" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew\n{"step": 3, "reward": 0.5}\n')
    assert main(["report", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lmrl: ") and words in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("samples.jsonl", '{"text": "foreign"}', "samples.jsonl, line 1 is not an answer as a run writes it: '{\"text"),
        ("samples.jsonl", '{"when": "after", "prompt": 5, "completion": "", "reward": 1}', "samples.jsonl, line 1"),
        ("config.json", "[1]", "config.json holds a list, not an object"),
        ("config.json", "{", "config.json is not JSON"),
        ("eval-1/eval.json", "{}", "eval.json is not what lmrl eval writes (KeyError: 'results'); move it away"),
        ("eval-1/eval.json", '{"results": {"pass@1": [1]}, "model": "a"}', "eval.json is not what lmrl eval writes"),
    ],
)
def test_a_file_that_is_none_of_a_runs_is_named_with_the_remedy(file, content, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", [0.5])
    (tmp_path / "a" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "a" / file).write_text(content)
    assert main(["report", "a"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lmrl: ") and words in err and err.count("\n") == 1


def test_metrics_without_a_reward_are_drawn_without_it(tmp_path):
    folder = make_run(tmp_path / "a", [0.5])
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "entropy": 1.0}\n')
    assert f"a 1 {interval(0)} {interval(1)} – 0.0 min" in Page(report_page([read_run(folder)])).text


def test_runs_stand_before_the_options():
    assert parse("report", ["a", "b", "--num-problems", "3"]) == ReportConfig(("a", "b"), num_problems=3)

import asyncio
import inspect
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest

from lmrl import sandbox
from lmrl.rewards import CodeMatch, MathMatch, extract_code, last_boxed, score_completions
from lmrl.sandbox import VerdictServer, run_python

needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="pip install 'lmrl[tasks]'")
TOWER = r"the answer is \boxed{9^{9^{9^9}}}"


def descendants(process):
    """The ids of all living processes below one, by /proc."""
    found = []
    for task in os.scandir(f"/proc/{process}/task"):
        for child in open(f"{task.path}/children").read().split():
            found += [int(child), *descendants(child)]
    return found


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------- mathematics (12)


@pytest.fixture(scope="module")
def maths():
    return MathMatch(seconds=3.0)


def grade(maths, given, right):
    return score_completions(maths, [""] * len(given), given, {"answer": right})


@needs_math
@pytest.mark.parametrize(
    ("given", "right", "reward"),
    [
        (r"\boxed{42}", "42", 1.0),
        (r"\boxed{42}", 42, 1.0),
        (r"first \boxed{41}, then \boxed{42}", "42", 1.0),
        (r"first \boxed{42}, then \boxed{41}", "42", 0.0),
        (r"\boxed{\frac{\sqrt{8}}{4}}", r"$1/\sqrt{2}$", 1.0),
        (r"\boxed{0.5}", r"we find \boxed{\frac12}", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{-3}", "3", 0.0),
        ("42", "42", 0.0),
        (r"\boxed{42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{" + "\ud800" + "}", "42", 0.0),
        (r"\boxed{1", "", 0.0),
        (r"\boxed{1}", "", None),
    ],
)
def test_boxed_mathematics(maths, given, right, reward):
    values, graded = grade(maths, [given], [right])
    assert ([v if g else None for v, g in zip(values.tolist(), graded.tolist())]) == [reward]
    assert maths.metrics == {"math_timeouts": 0, "math_crashes": 0}


def in_this_thread(call):
    return call()


def in_a_worker_thread(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


def in_an_event_loop(call):
    async def main():
        return call()

    return asyncio.run(main())


@needs_math
@pytest.mark.parametrize("where", [in_this_thread, in_a_worker_thread, in_an_event_loop])
def test_pitfall_12_a_verifier_that_hangs(maths, where):
    assert grade(maths, [r"\boxed{42}"], ["42"])[0].item() == 1.0
    process = maths.server.process
    values, graded = where(lambda: grade(maths, [TOWER, r"\boxed{42}"], ["42", "42"]))
    assert values.tolist() == [0.0, 1.0] and graded.all()
    assert maths.metrics == {"math_timeouts": 1, "math_crashes": 0}
    assert descendants(process.pid) == [] and maths.server.process is process
    assert grade(maths, [r"\boxed{42}"], ["42"])[0].item() == 1.0


@needs_math
def test_pitfall_12_ten_in_a_row_do_not_exhaust_the_pool():
    maths = MathMatch(seconds=0.3)
    for count in (1,) * 8 + (12,):
        assert grade(maths, [TOWER] * count, ["42"] * count)[0].tolist() == [0.0] * count
        assert maths.metrics["math_timeouts"] == count
    assert descendants(maths.server.process.pid) == []


@needs_math
def test_what_needs_too_much_memory_is_not_right():
    long = " + ".join(f"{n}x^{{{n}}}" for n in range(400))
    assert VerdictServer(60.0).ask([("1", long), (long, long)]) == ["wrong", "right"]
    assert VerdictServer(60.0, memory=2**20).ask([(long, long)])[0] in ("no answer", "unreadable", "crash")


@needs_math
def test_no_process_is_left_when_the_reward_is_dropped():
    maths = MathMatch()
    grade(maths, [r"\boxed{1}"], ["1"])
    process = maths.server.process
    assert process.poll() is None
    del maths
    assert process.poll() is not None


@needs_math
def test_no_process_is_left_when_the_trainer_is_killed():
    code = (
        "from lmrl.rewards import MathMatch; import time; m = MathMatch(seconds=2.0);"
        "m([''], ['\\\\boxed{1}'], answer=['1']); print(m.server.process.pid, flush=True);"
        f"m([''], [{TOWER!r}], answer=['1']); time.sleep(60)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    helper = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not alive(helper))


def alive(process):
    try:
        return "Z" not in open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_math
def test_a_helper_that_ends_is_reported_and_started_again(maths):
    grade(maths, [r"\boxed{1}"], ["1"])
    maths.server.process.kill()
    maths.server.process.wait()
    assert grade(maths, [r"\boxed{1}"], ["1"])[0].item() == 1.0
    broken = VerdictServer(1.0)
    broken.source = "import math_verify\nraise SystemExit('no room')"
    with pytest.raises(RuntimeError, match="ended with 1: no room"):
        broken.ask([("1", "1")])


@needs_math
def test_threads_share_one_helper(maths):
    def ask(number):
        return grade(maths, [rf"\boxed{{{number}}}"] * 3, [str(number), str(number + 1), str(number)])[0].tolist()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(12))) == [[1.0, 0.0, 1.0]] * 12


def test_without_math_verify_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"math-verify: .*pip install -c constraints.txt -e '.\[tasks\]'"):
        MathMatch()


def test_last_boxed():
    assert last_boxed(r"\boxed{a} \boxed{\frac{1}{2}} x") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{}") == "" and last_boxed("") is None and last_boxed(r"\boxed{a}\boxed{b") is None
    assert last_boxed("\\boxed{" * 2000 + "x" + "}" * 2000) == "x"


# ---------------------------------------------------------------------------------------------------- untrusted programs

LINUX = sys.platform == "linux" and run_python("", seconds=20).no_network
walled = pytest.mark.skipif(not LINUX, reason="this kernel allows no namespaces here")


def run(program, **settings):
    return run_python(program, **({"seconds": 20} | settings))


def test_a_program_reads_writes_and_ends():
    result = run("import sys; print(input()[::-1]); sys.stderr.write('e'); sys.exit(3)", stdin="héllo\n")
    assert (result.stdout, result.stderr, result.exit_code, result.timed_out) == ("olléh\n", "e", 3, False)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)", "input()\nwhile True: pass"])
def test_time_is_limited(program):
    result = run(program, stdin="\n", seconds=0.5)
    assert result.timed_out and result.exit_code == -9


def test_cpu_time_is_limited():
    result = run("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", seconds=20)
    assert result.stdout == "(20, 20)\n"


def test_what_its_cpu_limit_ends_was_too_slow(monkeypatch):
    late = inspect.getsource(sandbox.supervise).replace("ITIMER_REAL, seconds", "ITIMER_REAL, 20 + seconds")
    monkeypatch.setattr(sandbox.inspect, "getsource", lambda _: late)
    result = run("while True: pass", seconds=0.5)
    assert result.timed_out and result.exit_code == -9
    assert not run("import os; os.kill(os.getpid(), 9)").timed_out


def test_memory_is_limited():
    assert "MemoryError" in run("x = bytearray(2**30)").stderr
    assert run("x = bytearray(2**30); print(1)", memory=2**32).stdout == "1\n"


def test_output_is_limited():
    result = run("while True: print('x' * 100, flush=True)", output=1000)
    assert len(result.stdout) == 1000 and result.exit_code != 0
    result = run("open('big', 'wb').write(b'x' * 10**6)", output=1000)
    assert "File too large" in result.stderr


def test_nothing_of_ours_is_in_its_environment(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    assert "SECRET" not in run("import os; print(dict(os.environ))").stdout


@walled
def test_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)")
    assert result.exit_code == 1 and "unreachable" in result.stderr and result.no_network


@walled
def test_no_other_process_can_be_signalled():
    victim = subprocess.Popen(["sleep", "60"])
    program = (
        f"import os\nfor p in ({victim.pid}, {os.getpid()}, -1):\n  try: os.kill(p, 9)\n  except OSError as e: print(e)"
    )
    assert run(program).stdout.count("No such process") == 3
    assert victim.poll() is None
    victim.kill()
    victim.wait()


LEAVES_A_CHILD = "import os\nif os.fork() == 0:\n  {session}os.execv('/usr/bin/sleep', ['sleep', '{seconds}'])\n"


def sleepers(seconds):
    """The processes that sleep for just so long."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += [process] * (open(f"/proc/{process}/cmdline").read().split("\0")[:2] == ["sleep", seconds])
        except OSError:
            continue
    return found


@walled
@pytest.mark.skipif(os.getuid() != 0, reason="another user's program starts no process")
@pytest.mark.parametrize("ending", ["import time\ntime.sleep(0.3)", "while True: pass"])
def test_what_it_leaves_behind_dies_with_it(ending):
    mark = f"{500 + random.random()}"
    run(LEAVES_A_CHILD.format(session="os.setsid(); ", seconds=mark) + ending, seconds=1)
    assert sleepers(mark) == []


@pytest.mark.skipif(not (LINUX and run_python("", seconds=20).no_files), reason="no Landlock here")
def test_no_file_of_ours_can_be_read_written_or_deleted(tmp_path):
    ours = tmp_path / "ours"
    ours.write_text("secret")
    for attempt in (
        "open({!r}).read()",
        "open({!r}, 'w')",
        "import os; os.remove({!r})",
        "import os; os.rename({!r}, 'mine')",
        "import os; os.truncate({!r}, 0)",
        "import os; os.link({!r}, 'mine')",
        "import os; os.symlink({!r}, 'mine'); open('mine').read()",
    ):
        result = run(attempt.format(str(ours)))
        assert result.exit_code == 1 and result.no_files, attempt
        assert "Permission denied" in result.stderr or "cross-device" in result.stderr, attempt
    assert ours.read_text() == "secret"
    for attempt in (f"open({str(tmp_path / 'new')!r}, 'w')", f"import os; os.listdir({str(tmp_path)!r})"):
        assert "Permission denied" in run(attempt).stderr
    assert "Permission denied" in run(f"open('/proc/{os.getpid()}/environ').read()").stderr
    assert (
        run("open('a', 'w').write('x'); print(open('a').read(), open('/dev/null', 'w').write('x'))").stdout == "x 1\n"
    )
    assert list(tmp_path.iterdir()) == [ours]


def test_modules_of_this_python_can_be_imported():
    assert run("import numpy; print(numpy.ones(3).sum())", memory=2**31).stdout == "3.0\n"


def test_where_the_kernel_has_no_walls_the_limits_stand_and_the_result_says_so(monkeypatch):
    source = inspect.getsource(sandbox.supervise)
    assert 'linux = sys.platform == "linux"' in source
    bare = source.replace('linux = sys.platform == "linux"', "linux = False")
    monkeypatch.setattr(sandbox.inspect, "getsource", lambda _: bare)
    result = run("print(1)")
    assert result.stdout == "1\n" and not result.no_network and not result.no_files
    mark = f"{500 + random.random()}"
    run(LEAVES_A_CHILD.format(session="", seconds=mark) + "import time\ntime.sleep(0.3)")
    assert sleepers(mark) == []
    assert run("while True: pass", seconds=0.5).timed_out
    assert "MemoryError" in run("x = bytearray(2**30)").stderr


def test_a_supervisor_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(sandbox.inspect, "getsource", lambda _: "raise SystemExit('broken')\ndef supervise(*_): pass")
    with pytest.raises(RuntimeError, match="supervisor of an untrusted program failed: broken"):
        run("print(1)")


# ------------------------------------------------------------------------------------------------------------ code reward


def judge(texts, tests, **settings):
    reward = CodeMatch(**({"seconds": 20} | settings))
    values, graded = score_completions(reward, [""] * len(texts), texts, {"tests": [tests] * len(texts)})
    return [v if g else None for v, g in zip(values.tolist(), graded.tolist())], reward.metrics


def test_all_tests_must_pass():
    texts = [
        "Here:\n```python\nprint(int(input()) * 2)\n```\nDone.",
        "print(4)",
        "print(int(input()) * 2, end='  \\n\\n')",
        "print(int(input()) * 2)\nraise SystemExit(1)",
        "syntax error",
        "",
        "import os\nos._exit(0)",
        "```\nprint(1)\n```\n```python\nprint(int(input()) * 2)\n```",
    ]
    rewards, metrics = judge(texts, [("2\n", "4\n"), ("3\n", "6")])
    assert rewards == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0] and metrics == {"code_timeouts": 0}


def test_timeouts_are_counted_and_no_tests_is_none():
    assert judge(["while True: pass", "print(1)"], [("", "1")], seconds=5) == ([0.0, 1.0], {"code_timeouts": 1})
    assert judge(["print(1)"], [])[0] == [None]


def test_an_exit_before_the_assertions_would_pass_them():
    """Why tests are pairs: the verdict must not be the accused's."""
    assert run("import os; os._exit(0)\nassert 1 == 2").exit_code == 0
    assert judge(["import os; os._exit(0)"], [("", "2")])[0] == [0.0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("a\n```py\nx\n```\nb\n```\ny\n```\n", "y\n"),
        ("```python\nx\n", "```python\nx\n"),
        ("use ```x``` here", "use ```x``` here"),
        ("", ""),
    ],
)
def test_extract_code(text, code):
    assert extract_code(text) == code


def test_extract_code_is_quick():
    assert extract_code("```\n" * 10_001).count("`") in (0, 3)

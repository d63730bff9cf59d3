"""What README and docs show is run, parsed or looked up: code, commands, links and paths."""

from __future__ import annotations

import json
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from doc_pages import COMMANDS, CONF, PAGES, PLAIN, ROOT, blocks, commands, name_of, prose, rows
from flwr.app import ArrayRecord
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from fl_app.data import Normalization as Pixels
from fl_app.models import build
from fl_app.node_config import KEYS
from server_app import cli
from server_app.export.exporting import Begun, StoredModels, write_programs
from server_app.launch import arguments
from server_app.launch.result import print_result
from server_app.settings.catalogue import merge_settings
from server_app.settings.choices import CHOICES
from server_app.settings.read import known_options, read_settings
from strategies.core.durable import read_json
from strategies.core.errors import OneShotError
from strategies.core.facts import UploadFacts
from strategies.flower.messages import Request, read_reply
from strategies.method import Job, Normalization, Silent, Upload
from strategies.uploads.checks import Signatures

MakeRun = Callable[[str, bool], Path]
README, DOCS = ROOT / "README.md", ROOT / "docs"
RUNNING, RUN_FOLDER, PLUG_IN = DOCS / "running.md", DOCS / "run-folder.md", DOCS / "plug-in.md"
KINDS = {o.key: o.kind for o in known_options()}
# The code of docs/getting-started.md stands between its commands, as tests/docs/test_walkthrough.py runs it.
WITH_CODE = [page for page in PAGES if blocks(page, "python") and page.name != "getting-started.md"]
# Files of the examples, which a reader would write.
EXAMPLES = {"strategies/methods/trimmed_mean.py", "strategies/methods/disagreement.py"}
MERGED = 'merge(models, "tally",'
QUICKLY_MERGED = f"{MERGED} threads=1, config=__import__('strategies').TallyConfig(epochs=1, images=16),"
SMALL = "client.epochs=1 data.limit=200 server.epochs=1 tally.images=64 tally.probes=64"


def execute(page: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str] = str) -> dict[str, Any]:
    """Run a page's Python blocks in order, as one module of the library's package; return its names."""
    module = types.ModuleType(f"strategies.{page.stem.lower().replace('-', '_')}_blocks")
    module.__package__ = "strategies.methods"  # blocks that show a file of the library import relatively
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in blocks(page, "python"):
        exec(compile(change(code), name_of(page), "exec"), vars(module))  # noqa: S102  our own pages
    return vars(module)


def make_runs(page: Path, make: MakeRun) -> None:
    for name in sorted(set(re.findall(r"runs/[\w-]+", "\n".join(blocks(page, "python"))))):
        make(name, page != RUN_FOLDER)


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_python_blocks_run_in_order(page: Path, finished_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(page, finished_run)
    if page == RUN_FOLDER:  # as `oneshot export` writes it
        student = Begun(build("lenet5", num_classes=10, input_shape=(1, 16, 16)), Pixels((0.5,), (0.5,)))
        stored = StoredModels({"student": student.eval()}, (1, 16, 16), 10, Pixels((0.5,), (0.5,)), "")
        Path("models").mkdir()
        write_programs(stored, "student", Path("models"), ("torch",))
    names = execute(page, monkeypatch, lambda code: code.replace(MERGED, QUICKLY_MERGED))
    for key in ("model", "ensemble", "student"):
        if isinstance(names.get(key), torch.nn.Module):
            shape = (2, 1, 16, 16) if page == RUN_FOLDER else (2, 3, 32, 32)
            assert names[key](torch.zeros(shape)).shape == (2, 10)


def test_readme_merges_models_in_ten_lines() -> None:
    [code] = blocks(README, "python")

    assert MERGED in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


def test_readme_shows_the_table_as_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = blocks(README, "text")
    alone = (64.8, 63.8, 72.4, 67.2, 57.2)
    together = {"FedAvg (one shot)": ("baseline", 66.0, 61.7, 70.0), "FedENS": ("ensemble", 83.6, 80.1, 86.6)}
    together |= {"Tally ensemble": ("ensemble", 88.2, 85.1, 90.7), "Tally": ("student", 88.4, 85.3, 90.9)}
    table = [{"name": f"client-{k:03}", "kind": "client", "accuracy": value} for k, value in enumerate(alone)]
    for name, (kind, *shares) in together.items():
        score = dict(zip(("value", "low", "high"), (share / 100 for share in shares), strict=True))
        table.append({"name": name, "kind": kind, "accuracy": shares[0], "scores": {"accuracy": score}})
    facts = {"method": "tally", "seed": 0, "uploads": 5, "refused": 0, "refusals": [], "seconds": {}, "run_dir": ""}

    print_result({**facts, "table": table, "mib_up_per_client": 0.2, "mib_down_per_client": 0.0}, "text")

    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.slow
def test_notebook_merges_models_into_a_better_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "examples/merge.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102  our own notebook

    assert names["scores"]["ensemble"]["accuracy"] > max(names["alone"]) + 10
    assert names["scores"]["student"]["accuracy"] > max(names["alone"]) + 10
    assert (tmp_path / "merged/student.safetensors").is_file()


def test_readme_s_line_is_that_of_the_whole_server_app() -> None:
    [change] = blocks(README, "diff")
    added = [line.removeprefix("+").strip() for line in change.splitlines() if line.startswith("+")]
    assert len(added) == 2
    assert all(any(line in code for code in blocks(PLUG_IN, "python")) for line in added)


@pytest.mark.slow
def test_plug_in_server_app_ends_with_a_student(finished_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(PLUG_IN, finished_run)
    shown = "strategy = Tally(Net, num_classes=10, input_shape=(3, 32, 32))"
    assert sum(shown in code for code in blocks(PLUG_IN, "python")) == 1
    quick = "compute='in-process', config=__import__('strategies').TallyConfig(epochs=1, images=8))"
    changes = {
        shown: f"{shown[:-1]}, {quick}",
        "student = strategy.outcome": "seen.append((strategy.outcome, result))",
        "app = ServerApp()": "app, seen = ServerApp(), []",
        'if __name__ == "__main__":': "if True:",
    }
    names = execute(
        PLUG_IN, monkeypatch, lambda code: reduce(lambda text, old: text.replace(old, changes[old]), changes, code)
    )
    [(student, result)] = names["seen"]
    assert student(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    weights = result.arrays.to_torch_state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in student.state_dict().items())


def test_plug_in_client_app_sends_valid_uploads(finished_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(PLUG_IN, finished_run)
    names = execute(PLUG_IN, monkeypatch)
    signatures = Signatures({"net": names["Net"], "large-net": names["LargeNet"]})

    def answer(held: tuple[str, ...]) -> Any:
        asked = Request(ArrayRecord(), {}, 1, "run", 0, held).message(1)
        content = names["train"](asked, None).content
        return read_reply(content, signatures, num_classes=10, max_bytes=10**6, sender="node-1")

    first = answer(())
    assert (first.facts.client, first.facts.architecture, first.facts.num_examples) == ("hospital-a", "net", 100)
    assert first.facts.label_counts == (60, 40, *[0] * 8)
    assert answer(("hospital-a",)).held


def test_the_method_that_trains_on_the_page_about_methods_ends_with_a_student(
    finished_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DOCS / "adding-a-method.md"
    make_runs(page, finished_run)
    names = execute(page, monkeypatch)
    config = names["DisagreementConfig"](epochs=2, generator_steps=2, synthesis_batch_size=4, batch_size=4)
    uploads = tuple(Upload(UploadFacts(client, "net"), lambda: names["Net"]().state_dict()) for client in ("a", "b"))
    half = Normalization((0.5,) * 3, (0.5,) * 3)
    job = Job(uploads, {"net": names["Net"]}, "net", 10, (3, 32, 32), half, config)
    outcome = names["fit_disagreement"](job, Silent())
    assert outcome.student.keys() == names["Net"]().state_dict().keys()


@pytest.mark.parametrize("page", [*PAGES, *CONF], ids=name_of)
def test_commands_are_accepted_by_their_programs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(arguments, "run_named", Path)  # there is no run that `latest` could name
    for words in commands(page):
        assert words[0] in COMMANDS, f"{words[0]} is no command of these pages"
        if words[0] in CHECKS:
            CHECKS[words[0]](words[1:])
    assert CHECKS.keys() | PLAIN == COMMANDS


@cache
def commands_of(app: typer.Typer) -> Any:
    return typer.main.get_command(app)


def check_oneshot(words: list[str]) -> None:
    given = commands_of(cli.cli).commands[words[0]].make_context(words[0], words[1:]).params
    sources = list(given.get("settings") or given.get("changes") or [])
    settings = read_settings(merge_settings(sources, KINDS))
    named = [given["method"]] if given.get("method") else given.get("methods", "").split(",")
    assert {*named} <= {"", "all", *CHOICES}, named
    assert settings.choice.name in CHOICES


def check_make(words: list[str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    dry_run(*words)
    # To make the folder "tests" there is nothing to be done either.
    phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(" ".join(phony).split()), words


def check_flwr(words: list[str]) -> None:
    from flwr.cli.app import app

    command = commands_of(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    given = list(command.make_context(name, words).params.get("run_config_overrides") or [])
    if not given or Path(given[0]).name != "resume.toml":  # a run's own file
        read_settings(parse_config_args(given))


def check_superlink(words: list[str]) -> None:
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    _parse_args_run_superlink().parse_args(words)


def check_supernode(words: list[str]) -> None:
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

    config = _parse_args_run_supernode().parse_args(words).node_config
    if not config.endswith(".toml"):  # such a file is what deploy/nodes has
        assert parse_config_args([config]).keys() <= set(KEYS), config


def check_python(words: list[str]) -> None:
    script = words[0].removeprefix("/opt/oneshot-fl/")
    if script == "deploy/superlink.py":
        check_superlink(words[1:])
    elif script == "deploy/make_keys.py":
        make_keys()["parser"]().parse_args(words[1:])
    elif script.startswith("tests/bench/"):
        assert (ROOT / script).is_file() or script in read_json(ROOT / "docs" / "results" / "scripts.json"), words
    else:
        assert words[0] == "-m", words


@cache
def make_keys() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "deploy" / "make_keys.py"))


@cache
def dry_run(*words: str) -> None:
    named = f"PYTHON={sys.executable}"  # spares make the search for an interpreter
    subprocess.run(["make", "-n", named, *words], cwd=ROOT, check=True, capture_output=True)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "oneshot": check_oneshot,
    "make": check_make,
    "flwr": check_flwr,
    "flower-superlink": check_superlink,
    "flower-supernode": check_supernode,
    "python": check_python,
}


def test_commands_with_an_unknown_setting_are_refused() -> None:
    with pytest.raises(OneShotError, match="unknown setting"):
        check_oneshot(["run", "--run-config", "data.skew=1"])
    with pytest.raises(OneShotError, match="unknown setting"):
        check_flwr(["run", ".", "--run-config", "data.skew=1"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_the_package_that_are_shown_exist(page: Path) -> None:
    for name in re.findall(r"\boneshot_fl(?:\.\w+)+\b(?<!\.py)", page.read_text()):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_paths_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:strategies|fl_app|client_app|server_app|tests|conf|deploy|docs)/[\w./-]*)`", page.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists() and path not in EXAMPLES] == []


@pytest.mark.slow
def test_run_replay_and_resume_match_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [*blocks(README, "console"), *blocks(RUNNING, "console")]
    assert {"oneshot run\n", "oneshot run --local\n"} <= {*shown}
    replayed = "oneshot replay $RUN --method label-count-ensemble"
    assert any(replayed in block for block in shown)
    assert any(block.strip() == "oneshot resume $RUN" for block in shown)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "state"))

    def oneshot(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(cli.cli, [*words, "--format", "json"], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr[-2000:]
        [line] = done.stdout.splitlines()
        result: dict[str, Any] = json.loads(line)
        return result

    result = oneshot("run", "--local", "--set", SMALL, "--clients", "2")
    table = [row for row in rows(RUN_FOLDER.read_text(), "key") if not row[1].startswith("only ")]
    keys = {key for row in table for key in row[0].split(", ")}
    assert result.keys() == keys
    run = Path(result["run_dir"])
    [tree] = [block for block in blocks(RUN_FOLDER, "") if block.startswith("runs/")]
    promised = re.findall(r"[\w.]+\.(?:json|jsonl|safetensors|md|png)\b", tree)
    absent = [name for name in promised if not list(run.rglob(name))]
    # It is the app's. No upload was refused or judged, costs are equal, one epoch is no curve, Tally weighs by class,
    # heads were none.
    assert absent == [
        "refusals.jsonl", "flower_result.json", "clients.png", "communication.png", "server_curve.png",
        "client_weights.png", "choice.png", "gatekeeper.png",
    ]  # fmt: skip
    replay = oneshot(*replayed.replace("$RUN", str(run)).split()[1:])
    assert [row["kind"] for row in replay["table"]][-1] == "ensemble"
    assert replay["table"][:2] == result["table"][:2]
    assert oneshot("resume", str(run), "--local")["weights_sha256"] == result["weights_sha256"]

"""Facts that README and docs state, against the code that they are about."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import option_tables
import pytest
import torch
from doc_pages import ROOT, name_of, rows, section
from torch import nn

import strategies
from fl_app.data import GROUPS, PARTITIONERS, SOURCES, open_split
from fl_app.data.tables import FEATURES
from fl_app.data.text import CLASSES, LENGTH
from fl_app.data.torchvision_sets import KNOWN
from fl_app.models import ARCHITECTURES, build, builders
from fl_app.node_config import KEYS
from server_app.settings.choices import CHOICES
from server_app.settings.read import default_settings
from strategies.core.errors import OptionError
from strategies.core.options import PUBLISHED, QUICK, flatten, options_of, preset_of, presets_of
from strategies.flower.one_shot import OneShot
from strategies.method import METHODS, Need

DOCS = ROOT / "docs"
INDEX, DATA, MODELS = DOCS / "methods" / "README.md", DOCS / "data.md", DOCS / "models.md"
PLUG_IN, UPLOADS, OPERATORS = DOCS / "plug-in.md", DOCS / "uploads.md", ROOT / "deploy" / "README.md"
NEEDS = {
    Need.SAME_ARCHITECTURE: "one architecture",
    Need.COMMON_START: "one start",
    Need.LABEL_COUNTS: "label counts",
    Need.IMAGES: "images",
    Need.SIDES_OF_FOUR: "image sides in fours",
    Need.EXACT_SUMS: "exact sums",
    Need.IMAGE_GRADIENTS: "gradients to images",
    Need.PROXY_IMAGES: "images of the server",
}
# What models take that take no images -> its shape.
OTHERS = {"row": (FEATURES, 1, 1), "text": (1, 1, LENGTH)}


GROUPS_OF = {name: f"## {CHOICES[name].assumption}" for name in METHODS}


@pytest.mark.parametrize("heading", sorted(set(GROUPS_OF.values())))
def test_index_lists_the_methods_as_they_are_by_their_assumptions(heading: str) -> None:
    wanted = [
        [f"[{m.name}]({m.name}.md)", m.title, m.source, ", ".join(sorted(NEEDS[need] for need in m.needs)), m.kind]
        for m in (METHODS[name] for name, group in GROUPS_OF.items() if group == heading)
    ]
    assert rows(section(INDEX, heading), "name") == wanted


def test_every_method_has_a_page_and_every_page_a_method() -> None:
    others = {"README", "distillation"}
    assert {path.stem for path in INDEX.parent.glob("*.md")} - others == set(CHOICES)
    assert "(iterative.md)" in section(INDEX, "## Clients answer more than once")


ZOO = rows(section(MODELS, "## Architectures"), "name")


@pytest.mark.parametrize("row", ZOO, ids=lambda row: row[0])
def test_models_page_describes_an_architecture_as_it_is(row: list[str]) -> None:
    name, parameters, smallest, normalised = row[:4]
    shape = {"lenet5": (1, 32, 32), "mnist-cnn": (1, 28, 28), **OTHERS}.get(smallest if smallest in OTHERS else name)
    model = build(name, num_classes=2 if name == "logistic" else 10, input_shape=shape or (3, 32, 32))
    assert f"{sum(p.numel() for p in model.parameters()):,}" == parameters
    assert ("yes" if any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) else "no") == normalised
    if smallest not in OTHERS:
        assert [takes(name, int(smallest) + more) for more in (-1, 0)] == [False, True]


def takes(name: str, side: int) -> bool:
    try:
        return name in builders(10, (3, side, side))
    except OptionError:
        return False


def test_models_page_lists_every_architecture() -> None:
    assert [row[0] for row in ZOO] == list(ARCHITECTURES)


def test_data_page_lists_the_data_sets_as_they_are() -> None:
    table = {row[0]: row[1:] for row in rows(DATA.read_text(), "data.name")}
    assert list(table) == list(SOURCES)
    digits = open_split("digits", "test")
    assert table["digits"][:2] == [" x ".join(map(str, digits.input_shape)), str(digits.num_classes)]
    for name, known in KNOWN.items():
        size = known.image_size
        assert table[name] == [f"{known.channels} x {size} x {size}", str(known.num_classes), known.place]
    for name, group in GROUPS.items():
        side = f"{group.image_size} x {group.image_size}" if group.image_size else "data.image-size"
        assert table[name][:2] == [f"3 x {side}", str(group.num_classes)]
    assert table["heart-disease"][:2] == [f"rows of {FEATURES} features", "2"]
    assert table["ag-news"][:2] == [f"texts of {LENGTH} words", str(len(CLASSES))]


def test_deploy_page_lists_the_keys_of_a_node() -> None:
    assert {key for row in rows(OPERATORS.read_text(), "key of a node") for key in row[0].split(", ")} == set(KEYS)


@pytest.mark.parametrize(
    "page", [*option_tables.PAGES.values(), option_tables.SHARED, option_tables.SETTINGS], ids=name_of
)
def test_tables_of_options_are_as_the_code_has_them(page: Path) -> None:
    assert page.read_text() == option_tables.written(page), "run `make config`"


def options_on(name: str) -> list[tuple[str, str]]:
    """Return the options that a method's page shows, with their defaults; usual ones have the common table's."""
    text = section(option_tables.PAGES[name], "## Options")
    table, _, named = text.partition(option_tables.USUAL)
    usual = {row[0]: row[1] for row in rows(option_tables.SHARED.read_text(), "option")}
    shown = [(row[0], row[1]) for row in rows(table, "option")] if "| option |" in table else []
    return shown + [(key, usual[key]) for key in re.findall("`([^`]+)`", named)]


@pytest.mark.parametrize("name", list(CHOICES))
def test_page_of_a_method_has_every_option_once_with_its_default(name: str) -> None:
    quick = flatten(preset_of(CHOICES[name].config, QUICK), name)
    defaults = {option.key: option_tables.shown(quick[option.key]) for option in options_of(CHOICES[name].config, name)}
    shown = options_on(name)
    assert dict(shown) == defaults
    assert len(shown) == len(defaults)
    assert defaults or section(option_tables.PAGES[name], "## Options").strip() == "No options."


def test_tables_hold_every_setting() -> None:
    of_methods = {key for name in option_tables.NAMES for key, _ in options_on(name)}
    of_the_app = {row[0] for row in rows(option_tables.SETTINGS.read_text(), "setting")}
    assert of_methods | of_the_app == default_settings().keys()


@pytest.mark.parametrize("name", option_tables.PRESETS)
def test_page_of_a_method_describes_each_of_its_presets(name: str) -> None:
    text = option_tables.PAGES[name].read_text()
    assert re.findall(r"^- \*\*([\w-]+)\*\*:", text, re.MULTILINE) == [PUBLISHED, *presets_of(CHOICES[name].config)]


@pytest.mark.parametrize("name", list(option_tables.PAGES))
def test_figures_of_a_method_are_those_of_the_pages_of_results(name: str) -> None:
    figures = section(option_tables.PAGES[name], "## Figures")
    measured = {line for page in (DOCS / "lab").glob("*.md") for line in page.read_text().splitlines()}
    shown = [line for line in figures.splitlines() if line.startswith("|")]
    assert {line for line in shown if line not in measured and set(line) - set("|-: ")} == set()
    assert shown or figures.startswith(("\nNot measured here.", "\nAll figures are in ["))


# Those whose paper, or one that compares with them, prints accuracies.
PRINTED = ("fens", "dense", "co-boosting", "f-dafl", "f-adi", "flboost", "fed-gen", "feddf", "fedkd", "fedov", "fafi",
           "fusefl", "intactofl", "fedcvae-ens", "fed-et", "fedpft")  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_figures_of_a_method_say_whether_they_have_the_paper_s_settings(name: str) -> None:
    sentences = section(option_tables.PAGES[name], "## Figures").replace("\n", " ").split(". ")
    assert any("settings" in one for one in sentences)
    assert any("paper" in one for one in sentences)


def test_pages_list_every_law_and_every_settings_file() -> None:
    assert [row[0] for row in rows(DATA.read_text(), "data.partition")] == list(PARTITIONERS)
    named = re.findall(r"`(conf/[\w-]+\.toml)`", section(DOCS / "settings.md", "## The settings of the papers' tables"))
    assert sorted(named) == sorted(name_of(path) for path in (ROOT / "conf").glob("*.toml"))


@pytest.mark.parametrize("package", ["strategies", "server_app"])
def test_architecture_page_has_every_room(package: str) -> None:
    text = (DOCS / "architecture.md").read_text()
    files = (ROOT / package).rglob("*.py")
    rooms = {str(path.parent.relative_to(ROOT / package)) for path in files} - {".", "core/startup"}
    assert {room for room in rooms if f"| `{room}/` |" not in text} == set()


def flat_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64))


def test_plug_in_page_lists_the_strategies_and_their_arguments() -> None:
    table = {row[0]: row[1] for row in rows(PLUG_IN.read_text(), "class")}
    facts: dict[str, Any] = {"num_classes": 64, "input_shape": (1, 8, 8)}
    facts["proxy"] = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    made = {name: getattr(strategies, name)(flat_net, **facts) for name in table}
    assert {name: strategy.method.name for name, strategy in made.items()} == table
    in_rounds = {"iterative", "fed-gen", "flboost"}  # these have sections of their own
    app_alone = {"fusefl"}
    assert {*table.values(), *in_rounds, *app_alone} == set(CHOICES)
    assert all(f"`{name}` has no class here" in PLUG_IN.read_text() for name in app_alone)
    signature = inspect.signature(OneShot.__init__).parameters
    documented = {key: row[-1] for row in rows(PLUG_IN.read_text(), "argument") for key in row[0].split(", ")}
    assert documented.keys() == signature.keys() - {"self", "method", "observer", "facts", "flower"}
    for key in ("min_uploads", "fraction_evaluate", "seed"):
        assert documented[key] == str(signature[key].default)


@cache
def sentences(*files: Path) -> set[str]:
    """Return every text that some modules can print, with one mark in place of each run of inserted values."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.add(re.sub("\0+", "\0", "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


LINES = [row[0] for row in rows(UPLOADS.read_text(), "line")] + [
    row[0] for row in rows(section(UPLOADS, "## Checks, in this order").rpartition("the quorum decides")[2], "line")
]


@pytest.mark.parametrize("line", LINES)
def test_uploads_page_shows_a_refusal_as_the_code_says_it(line: str) -> None:
    library = ROOT / "strategies"
    files = [library / "core" / "refusals.py", *(library / "flower").glob("*.py")]
    assert any(says(sentence, line) for sentence in sentences(*files)), line


def says(sentence: str, line: str) -> bool:
    """Whether a text of the code can be a line, which may leave out its subject and its reason."""
    pattern = re.sub("\0+", "\0", re.sub(r"<[^>]*>", "\0", line)).strip("\0")
    if pattern in sentence:
        return True
    literal, whole = sentence.replace("\0", ""), ".+".join(map(re.escape, sentence.split("\0")))
    begins = line.startswith(sentence.partition("\0")[0])  # most do not, and patterns take long
    return begins and len(literal) > 15 and re.fullmatch(whole, line) is not None


def test_licence_is_the_plain_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert "Copyright [yyyy] [name of copyright owner]" in text

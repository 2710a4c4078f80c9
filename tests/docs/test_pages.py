"""The pages: complete, with links that lead somewhere, and a start that can be pasted into a fresh interpreter."""

from __future__ import annotations

import code
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import recollect
from recollect import compat

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("api/*.md"))]


@pytest.fixture(scope="module")
def index() -> ModuleType:
    spec = importlib.util.spec_from_file_location("error_index", DOCS / "error_index.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["error_index"] = module
    spec.loader.exec_module(module)
    return module


def test_the_index_of_errors_has_every_text_that_is_raised(index: ModuleType) -> None:
    entries, unknown = index.find_entries()
    assert unknown == []
    texts = [entry.text for entry in entries]
    assert any(text.startswith("pattern {pattern} matches no module of") for text in texts)
    assert any(text.startswith("region '{") and "saved tensor" in text for text in texts)
    assert any(text.startswith("values that are already in host memory stay") for text in texts)  # noted, then warned
    assert all(entry.what and entry.cure for entry in entries)


def test_a_text_that_cannot_be_found_is_noticed(index: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("def f():\n    raise ValueError(made(elsewhere))\n", "utf-8")
    assert index.find_entries(tmp_path) == ([], ["odd.py:2"])


def test_a_function_of_the_same_name_in_another_file_gives_no_text(index: ModuleType, tmp_path: Path) -> None:
    for name, text in (("one.py", "no such plan"), ("two.py", "no such batch")):
        source = f"def f():\n    raise ValueError(_refuse())\ndef _refuse():\n    return {text!r}\n"
        (tmp_path / name).write_text(source, "utf-8")
    entries, _ = index.find_entries(tmp_path)
    assert [(entry.file, entry.text) for entry in entries] == [("two.py", "no such batch"), ("one.py", "no such plan")]


def test_a_function_of_its_own_package_gives_its_text_before_those_of_others(index: ModuleType, tmp_path: Path) -> None:
    sources = {
        "_offload/sending.py": "def f(self):\n    raise OffloadError(self._describe())\n",
        "_offload/transfers.py": "def _describe():\n    return 'a copy failed'\n",
        "_apply/rules.py": "def _describe():\n    return 'recompute it all'\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source, "utf-8")
    entries, unknown = index.find_entries(tmp_path)
    assert ([entry.text for entry in entries], unknown) == (["a copy failed"], [])


def test_no_text_of_the_library_is_called_a_fault_of_its_own_without_need(index: ModuleType) -> None:
    entries, _ = index.find_entries()
    assert [entry.text for entry in entries if entry.cure == index._BUILTIN] == []


def test_a_text_is_split_into_what_and_what_to_do(index: ModuleType, tmp_path: Path) -> None:
    message = "no plan fits {x}: the least is {x + 1}. Raise the budget"
    source = f"def f(x):\n    message = f'{message}'\n    raise ValueError(message)\n"
    (tmp_path / "fit.py").write_text(source, "utf-8")
    ((entry,), unknown) = index.find_entries(tmp_path)
    assert unknown == []
    assert (entry.kind, entry.what) == ("ValueError", "no plan fits {x}")
    assert entry.cure == "The least is {x}. Raise the budget"


def test_a_text_is_known_to_its_end_and_by_more_than_its_option(index: ModuleType, tmp_path: Path) -> None:
    source = """
def f(x, hint):
    expected = "expected a whole number"
    if x is None:
        message = f"every={x}: {expected}, "
        message += "as in every=2"
        raise TypeError(message)
    message = "this cannot be meant"
    if hint:
        message += f": write {hint}"
    raise ValueError(message)
"""
    (tmp_path / "fit.py").write_text(source, "utf-8")
    entries, unknown = index.find_entries(tmp_path)
    assert unknown == []
    assert [(entry.what, entry.text) for entry in entries] == [
        ("every={x}: expected a whole number, as in every=2", "every={x}: expected a whole number, as in every=2"),
        ("this cannot be meant", "this cannot be meant"),
        ("this cannot be meant", "this cannot be meant: write {hint}"),
    ]


def test_what_is_filled_in_is_named_as_a_reader_would(index: ModuleType, tmp_path: Path) -> None:
    message = "{short_repr(tier)} is a {type(tier).__name__} of {count_noun(n, 'part')}{hint_nearest(tier, TIERS)}"
    source = f'def f(tier, n):\n    message = f"{message}"\n    raise ValueError(message)\n'
    (tmp_path / "fit.py").write_text(source, "utf-8")
    ((entry,), _) = index.find_entries(tmp_path)
    assert entry.text == "{tier} is a {class} of {number} parts"


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = "\n".join(path.read_text("utf-8") for path in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"\.\. auto(?:function|class|exception):: recollect\.(\w+)\n", pages)
    assert sorted(listed) == sorted(set(recollect.__all__) - {"policies"})


def test_every_policy_is_on_its_page_of_the_reference() -> None:
    page = (DOCS / "api/policies.md").read_text("utf-8")
    listed = re.findall(r"^\.\. (?:autofunction:: recollect\.policies\.|py:data:: )(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(recollect.policies.__all__)


def test_every_name_of_compat_is_on_its_page_of_the_reference() -> None:
    page = (DOCS / "api/compat.md").read_text("utf-8")
    listed = re.findall(r"^\.\. (?:auto(?:function|class):: recollect\.compat\.|py:data:: )(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(compat.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_every_example_is_on_the_page_of_examples() -> None:
    listed = re.findall(r"^\| `(\S+)` \|", (DOCS / "examples.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(
        path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")
    )


def test_every_page_is_in_the_table_of_contents() -> None:
    toc = "\n".join(path.read_text("utf-8") for path in (DOCS / "index.md", DOCS / "api/index.md"))
    names = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES[1:]} - {"index", "api/index"}
    listed = {line.strip() for line in toc.splitlines()}
    assert {name for name in names if name not in listed and name.removeprefix("api/") not in listed} == set()


def test_every_name_of_torch_remat_has_a_line_that_says_what_to_write() -> None:
    remat = pytest.importorskip("torch_remat")
    text = (DOCS / "migrating.md").read_text("utf-8").partition("## From torch_remat")[2]
    left = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    named = {name for cell in left for name in re.findall(r"`(\w+)", cell)}
    public = {name for name in vars(remat) if not name.startswith("_")} - {"annotations"}
    assert public - named == set()


def test_the_start_can_be_pasted_into_a_fresh_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "getting-started.md").read_text("utf-8")
    lines = [line[4:] for line in text.splitlines() if line.startswith((">>> ", "... ")) or line in (">>>", "...")]
    assert len(lines) > 30
    prompt = code.InteractiveConsole({"__name__": "__main__"}, "<stdin>")
    is_open = [prompt.push(line) for line in [*lines, "print('reached the end')"]][-1]
    said = capsys.readouterr()
    assert "Error" not in said.err, said.err
    assert said.out.endswith("reached the end\n")
    assert not is_open

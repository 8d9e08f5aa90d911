"""The reference pages of docs/ say what the code says."""

import ast
import re
from pathlib import Path

import lightning_replica
from lightning_replica import exit_codes
from lightning_replica.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = Path(lightning_replica.__file__).parent


def cells(page: str) -> list[str]:
    """The first cell of each row of the tables of a page, without heads."""
    rows = [line.split("|")[1].strip() for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    return [cell for cell in rows if cell.startswith("`")]


def quoted(page: str) -> list[str]:
    return [each for cell in cells(page) for each in re.findall("`([^`]+)`", cell)]


def texts() -> list[str]:
    """All strings of the package, those with holes as they read with an ellipsis in each."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [each.value if isinstance(each, ast.Constant) else "..." for each in node.values]
                found.append("".join(map(str, parts)))
    return found


def test_messages_are_those_of_the_code() -> None:
    said = "\n".join(texts())
    messages = quoted("messages.md")
    assert len(messages) > 15
    assert [each for each in messages if each not in said] == []


def test_variables_are_those_of_the_code() -> None:
    used = {text for text in texts() if re.fullmatch("LIGHTNING_REPLICA_[A-Z_]*[A-Z]", text)}
    assert {name for name in quoted("environment.md") if name.startswith("LIGHTNING_REPLICA_")} == used


def test_exit_codes_are_those_of_the_code() -> None:
    codes = {name: str(value) for name, value in vars(exit_codes).items() if name.isupper()}
    for page in ("environment.md", "dying_gasp.md"):
        rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / page).read_text(), re.M)
        assert {name: code for code, name in rows} == codes


def test_commands_are_those_of_the_code() -> None:
    assert {each.split()[0] for each in quoted("command_line.md")} == set(main._COMMANDS)


def test_all_classes_are_on_the_page() -> None:
    page = (DOCS / "reference.md").read_text()
    errors = set(vars(lightning_replica.errors))
    names = [name for name in lightning_replica.__all__ if name not in errors and name != "__version__"]
    assert [name for name in names if not re.search(rf"^::: [\w.]+\.{name}$", page, re.M)] == []


def test_all_pages_are_in_the_table_of_contents() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\w+\.md)$", text, re.M)
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md"))

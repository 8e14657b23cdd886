"""What the documentation shows is run; what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_tests_exist(page: Path) -> None:
    for target in re.findall(r"`(tests/[\w/]+\.py)`", page.read_text("utf-8")):
        assert (ROOT / target).exists(), target


def test_commands_shown_are_accepted() -> None:
    """Every `mocokit ...` line parses: the command exists and so do its flags."""
    from mocokit.cli import app

    seen = 0
    for page in PAGES:
        for block in re.findall(r"```\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for line in block.splitlines():
                words = line.partition(" #")[0].split()
                if words[:1] == ["mocokit"] and len(words) > 1:
                    app.parse_args(words[1:], exit_on_error=False, print_error=False)
                    seen += 1
    assert seen >= 3


def test_no_figure_is_a_placeholder() -> None:
    for page in PAGES:
        assert "FIGURES" not in page.read_text("utf-8"), page

import re

from paths import ROOT

from configs import document
from configs.loading import presets
from flows.cli import app

README = (ROOT / "README.md").read_text()


def test_configuration_page_matches_the_schema():
    assert (ROOT / "docs/configuration.md").read_text() == document.markdown()


def test_readme_names_every_command():
    commands = [c.name or c.callback.__name__ for c in app.registered_commands]
    assert [c for c in commands if not re.search(rf"ratchet (\w+ \| )*{c}\b", README)] == []


def test_readme_names_every_preset():
    assert [p for p in presets() if f"`{p}`" not in README] == []


def test_every_make_target_in_the_readme_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


def test_linked_files_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    links = {page: re.findall(r"\]\(((?!http)[^)#]+)\)", page.read_text()) for page in pages}
    assert [(p.name, link) for p, found in links.items() for link in found if not (p.parent / link).exists()] == []


def test_lines_of_prose_have_at_most_120_characters():
    long = []
    for page in [ROOT / "README.md", ROOT / "docs/how-it-works.md", ROOT / "docs/configuration.md"]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        long += [(page.name, line) for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")]
    assert long == []


def test_the_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 100

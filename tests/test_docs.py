import re

from paths import ROOT

from configs import document
from configs.loading import presets
from flows.cli import app

README = (ROOT / "README.md").read_text()


def test_configuration_page_is_the_schemas():
    assert (ROOT / "docs/configuration.md").read_text() == document.markdown()


def test_readme_names_every_command():
    commands = [c.name or c.callback.__name__ for c in app.registered_commands]
    assert [c for c in commands if not re.search(rf"ratchet (\w+ \| )*{c}\b", README)] == []


def test_readme_names_every_preset():
    assert [p for p in presets() if f"`{p}`" not in README] == []


def test_every_make_target_in_the_readme_exists():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


def test_every_file_that_the_pages_link_to_exists():
    links = re.findall(r"\]\(((?!http)[^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []

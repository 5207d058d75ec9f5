"""What the checks of the data found, and what was done about it."""

import logging
from dataclasses import dataclass, field
from typing import Any

from configs.errors import DataError
from configs.schema import Checks

EXAMPLES = 5
# What a finding of each check is, after a number; and what a user can do about it.
WORDS = {
    "missing": "row(s) with missing or empty fields",
    "unreadable": "row(s) that cannot be read or compared with",
    "encoding": "row(s) or text(s) with damaged encoding",
    "conflicts": "row(s) whose question has another gold answer elsewhere",
    "duplicates": "row(s) that repeat a question of their split",
    "leaks": "held-out question(s) that also occur in another split",
    "contamination": "training row(s) that share 13 words in a row with a held-out question",
    "near_duplicates": "row(s) that ask almost the same as an earlier or held-out one",
    "disagreements": "demonstration(s) that state another answer than gold",
}


@dataclass
class Finding:
    """One check: how often it found something, and how many of these were dropped, fixed or kept."""

    policy: str
    found: int = 0
    dropped: int = 0
    fixed: int = 0
    kept: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)

    def note(self, where: str, why: str, outcome: str) -> None:
        """One more; the first few are kept as examples."""
        self.found += 1
        setattr(self, outcome, getattr(self, outcome) + 1)
        if len(self.examples) < EXAMPLES:
            self.examples.append({"where": where, "why": why, "outcome": outcome})


class Findings:
    """The findings of every check, by its name, in the order of `WORDS`."""

    def __init__(self, checks: Checks, source: str):
        auto = "warn" if source == "arithmetic" else "drop"
        policies = {name: getattr(checks, name) for name in WORDS}
        self.by_check = {name: Finding(auto if policy == "auto" else policy) for name, policy in policies.items()}

    def __getitem__(self, check: str) -> Finding:
        return self.by_check[check]

    def note(self, check: str, where: str, why: str, outcome: str) -> None:
        """One more finding of a check."""
        self.by_check[check].note(where, why, outcome)

    def judge(self, check: str) -> None:
        """Raises DataError where something was found and the policy is to fail; otherwise says so in the log."""
        finding = self.by_check[check]
        if not finding.found:
            return
        first = finding.examples[0]
        if finding.policy == "fail":
            raise DataError(
                f"data.checks.{check} found {finding.found:,} {WORDS[check]}, the first at {first['where']} ({first['why']}): "
                f"correct the data, or set data.checks.{check} to something else than fail"
            )
        logging.getLogger("ratchet").warning("data.checks.%s: %s", check, self.sentence(check))

    def sentence(self, check: str) -> str:
        """What was found and done, in words, with the first example."""
        finding = self.by_check[check]
        done = ", ".join(
            f"{getattr(finding, outcome):,} {outcome}"
            for outcome in ("fixed", "dropped", "kept")
            if getattr(finding, outcome)
        )
        first = finding.examples[0]
        return f"{finding.found:,} {WORDS[check]} ({done}), the first at {first['where']}: {first['why']}"

    def plain(self) -> dict[str, dict[str, Any]]:
        """As JSON values."""
        return {name: vars(finding) for name, finding in self.by_check.items()}

"""Where the project and the real data set are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The folder of GSM8K's train.jsonl and test.jsonl; tests that read it are skipped where it is absent.
GSM8K = Path(os.environ.get("RATCHET_GSM8K", ROOT.parent / "shared/data/gsm8k"))

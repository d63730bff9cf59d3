"""Every decoder of the repository, by name."""

from __future__ import annotations

from fuzz_files import FILES
from fuzz_messages import MESSAGES

DECODERS = {**MESSAGES, **FILES}

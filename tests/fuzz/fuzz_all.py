"""Every decoder of the repository, by name."""

from __future__ import annotations

from fuzz_files import FILES
from fuzz_messages import MESSAGES
from fuzz_wire import WIRE

DECODERS = {**MESSAGES, **WIRE, **FILES}

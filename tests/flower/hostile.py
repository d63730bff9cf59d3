"""A hostile node: its ClientApp's answers are lies, by an attack that a file names.

A copy of this file named sitecustomize.py, in a folder on the PYTHONPATH of a SuperNode, changes the processes of its
ClientApps. The file ``attack`` beside it names the attack, so that every run may meet another one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGED = b"\0"  # between an object's head and its body
HONEST = "none"
ANOTHER = "hospital-a"  # an honest client's name
BALLAST_MIB = 40


def place(folder: Path, attack: str = HONEST) -> str:
    """Put this file where a SuperNode's processes find it first; return the value for their PYTHONPATH."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(Path(__file__).read_text())
    (folder / "attack").write_text(attack)
    return str(folder)


# Changes of an answer's records.


def _array(values: Any, **changes: Any) -> Any:
    from flwr.app import Array

    good = Array(values)
    facts = {"dtype": good.dtype, "shape": good.shape, "stype": good.stype, "data": good.data} | changes
    return Array(**facts)


def _first(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return an attack on the first array of real numbers."""

    def attack(content: Any) -> None:
        record = content["arrays"]
        name = next(name for name, array in record.items() if array.dtype == "float32")
        record[name] = change(record[name].numpy().copy())

    return attack


def _shaped(*shape: int) -> Callable[[Any], Any]:
    """Return a change to a shape that the array's own header tells too."""

    def change(values: Any) -> Any:
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        return _array(values, shape=shape, data=data)

    return change


def _facts(**facts: Any) -> Callable[[Any], None]:
    return lambda content: content["upload"].update(facts)


def _ballast(content: Any) -> None:
    from flwr.app import ConfigRecord

    content["ballast"] = ConfigRecord({"bytes": bytes(BALLAST_MIB * 2**20)})


RECORDS: dict[str, Callable[[Any], None]] = {
    "a negative shape": _first(_shaped(-1)),
    "a shape of 0 times 2^62": _first(_shaped(0, 2**62)),
    "65 dimensions": _first(_shaped(*[1] * 65)),
    "a lying header": _first(lambda values: _array(values, data=b"\x93NUMPY\x01\x00\xff\xff" + bytes(99))),
    "no numbers": _first(lambda values: _array(values * float("nan"))),
    "numbers that overflow": lambda content: [  # type: ignore[func-returns-value]
        content["arrays"].update({name: _array(array.numpy() * 0 + 3e38)})
        for name, array in list(content["arrays"].items())
        if array.dtype == "float32"
    ],
    "another's name": _facts(client=ANOTHER),
    "another architecture": _facts(architecture="resnet34"),
    "an error in colours": _facts(error="\x1b[2J\x1b[31mall is well"),
    "ballast": _ballast,
    "nothing": lambda content: content.clear(),
    "a dead process": lambda content: os._exit(9),
}

# Changes of an array's object: of the list of its chunks.
CHUNKS: dict[str, Callable[[list[int]], Any]] = {
    "an absent chunk": lambda chunks: [*chunks, 7],
    "a chunk named often": lambda chunks: chunks * 100_000,
    "chunks that are no list": lambda chunks: {"chunks": chunks},
}
ATTACKS = (*RECORDS, *CHUNKS)
# Lies in the answers after an honest upload. All of them are refused, so every such run ends alike.
IN_ROUNDS = "in rounds: "
ROUND_ATTACKS = tuple(
    IN_ROUNDS + kind
    for kind in ("a negative shape", "65 dimensions", "a lying header", "no numbers", "ballast", "nothing", *CHUNKS)
)


def install() -> None:
    """Make this process's answers lies."""
    from flwr.app import Array
    from flwr.clientapp import ClientApp

    named = Path(__file__).with_name("attack").read_text()
    kind, later = named.removeprefix(IN_ROUNDS), named.startswith(IN_ROUNDS)
    answer, deflate = ClientApp.__call__, Array.deflate

    def lying(self: Any, message: Any, context: Any) -> Any:
        reply = answer(self, message, context)
        if later and not message.metadata.message_type.startswith("train."):  # the request of an upload
            return reply
        if kind in RECORDS and reply.has_content():
            RECORDS[kind](reply.content)
        if kind in CHUNKS:
            Array.deflate = deflated  # type: ignore[method-assign]
        return reply

    def deflated(self: Any) -> bytes:
        head, _, body = deflate(self).partition(CHANGED)
        facts = json.loads(body)
        facts["arraychunk_ids"] = CHUNKS[kind](facts["arraychunk_ids"])
        body = json.dumps(facts).encode()
        return head.rsplit(b" ", 1)[0] + b" %d" % len(body) + CHANGED + body

    ClientApp.__call__ = lying  # type: ignore[method-assign]


if __name__ == "sitecustomize" and any("flwr-clientapp" in word for word in sys.orig_argv):
    install()

"""The client half, for any ClientApp; importing it loads neither torch nor Ray.

A ClientApp that replies with stock records works unchanged. With these few lines it also has a name, is never asked
to train twice for one run, and can serve methods that need label counts::

    from strategies.client import already_held, upload_facts

    @app.train()
    def train(msg, context):
        if reply := already_held(msg, client="hospital-a"):
            return reply
        ...
        content["upload"] = upload_facts(client="hospital-a", architecture="resnet18", label_counts=counts)
        return Message(content, reply_to=msg)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flwr.app import ConfigRecord, Message, RecordDict

from ..uploads.checks import CLIENT_NAME as CLIENT_NAME


def already_held(msg: Message, *, client: str) -> Message | None:
    """Return the answer of a client whose upload the server holds already, or None if there is work to do."""
    held = msg.content.config_records.get("config", ConfigRecord()).get("held", [])
    if not isinstance(held, list) or client not in held:
        return None
    return Message(RecordDict({"upload": ConfigRecord({"client": client, "held": True})}), reply_to=msg)


def failure(msg: Message, *, client: str, reason: str) -> Message:
    """Return the answer of a client that has nothing to upload: the server then knows who is missing and why."""
    return Message(RecordDict({"upload": ConfigRecord({"client": client, "error": reason})}), reply_to=msg)


def upload_facts(
    *,
    client: str,
    architecture: str = "",
    label_counts: Sequence[int] | None = None,
    pretrained: bool = False,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> ConfigRecord:
    """Return the record that goes beside "arrays" and "metrics".

    Args:
        client: A stable name: letters, digits, '.', '_' and '-', at most 64 characters.
        architecture: The name under which the server knows this model; empty if it knows one only.
        label_counts: Training examples per class [C], if the client is willing to tell.
        pretrained: The weights were not trained in this run.
        ranges: What :func:`.calibration.calibrate` finds on the client's own examples; for methods that send models
            in INT8.
    """
    facts = ConfigRecord({"client": client})
    if architecture:
        facts["architecture"] = architecture
    if label_counts is not None:
        facts["label-counts"] = [int(count) for count in label_counts]
    if pretrained:
        facts["pretrained"] = True
    if ranges:
        facts["range-layers"] = list(ranges)
        facts["ranges"] = [float(bound) for pair in ranges.values() for bound in pair]
    return facts

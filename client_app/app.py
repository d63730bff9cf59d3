"""The ClientApp: train or load a model, upload it once, answer what follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.node import Asked, Node, client_name
from strategies.client import already_held, failure, upload_facts
from strategies.errors import OneShotError

if TYPE_CHECKING:
    import torch

    from client_app.keeping import Trained
    from fl_app.config import AppConfig

app = ClientApp()


@app.train()
def upload(msg: Message, context: Context) -> Message:
    """Answer the server's one question with a trained model."""
    name = client_name(context.node_config)
    if (reply := already_held(msg, client=name)) is not None:
        return reply
    # Late: what a message does not need, the process that answers it does not load.
    import torch

    from client_app.work import trained_model
    from fl_app.config import AppConfig

    try:
        config = AppConfig.from_settings(context.run_config)
        node = Node.of(context.node_config, config)
        torch.set_num_threads(1)
        asked = Asked.of(msg.content.config_records.get("config", ConfigRecord()), config.seed)
        start = msg.content.array_records.get("arrays", ArrayRecord()).to_torch_state_dict()
        return _reply(msg, config, node, *trained_model(config, node, asked, dict(start)))
    except OneShotError as error:
        return failure(msg, client=name, reason=str(error))


def _reply(
    msg: Message, config: AppConfig, node: Node, trained: Trained | None, state: dict[str, torch.Tensor]
) -> Message:
    counts = trained.label_counts if trained is not None and config.client.share_label_counts else None
    metrics = MetricRecord()
    if trained is not None:
        metrics["num-examples"] = trained.num_examples
        if trained.loss == trained.loss:
            metrics["train-loss"], metrics["train-accuracy"] = trained.loss, trained.accuracy
    # What was kept is what it was when it was trained.
    architecture = trained.architecture if trained is not None else node.architecture
    facts: ConfigRecord = upload_facts(
        client=node.client, architecture=architecture, label_counts=counts, pretrained=bool(node.checkpoint)
    )
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics, "upload": facts})
    return Message(content, reply_to=msg)

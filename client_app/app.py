"""The ClientApp: train or load a model, upload it once, and answer later requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from logging import ERROR
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from client_app.label_counts import reported_counts, reports_counts
from client_app.node import Node, TrainRequest
from fl_app.node_config import client_name, is_deployed, node_facts, node_policy
from fl_app.project import FAILURES
from strategies.client import TORN, already_held, answer_question, failure, read_arrays, upload_facts
from strategies.core.errors import OneShotError

if TYPE_CHECKING:
    import torch

    from client_app.keeping import Trained
    from fl_app.config import AppConfig
    from fl_app.node_policy import NodePolicy


def without_its_text(msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Answer with an unexpected error's type alone: on a deployed node its text, which may hold paths, stays there.

    A Flower mod, around every answer of this app.
    """
    try:
        return call_next(msg, context)
    except (*FAILURES, *TORN) as error:
        if not is_deployed(context.node_config):
            raise
        log(ERROR, "no answer for the server:", exc_info=error)
        reason = f"{type(error).__name__} in the client's app; the node's log says more"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=msg)


app = ClientApp(mods=[without_its_text])


@app.train()
def upload(msg: Message, context: Context) -> Message:
    """Answer the server's request for an upload with a trained model."""
    try:
        facts = node_facts(context.node_config, context.run_config)
        policy = node_policy(context.node_config, facts)
    except OneShotError as error:
        return failure(msg, client=client_name(context.node_config), reason=str(error))
    name = client_name(facts)
    if (reply := already_held(msg, client=name)) is not None:
        return reply
    if msg.content.config_records.get("config", ConfigRecord()).get("iterative"):
        return _one_round(msg, context, facts, policy)
    # Imported here, so that a process loads only the modules that its message needs.
    import torch

    from client_app.work import prepare_upload
    from fl_app.config import AppConfig

    try:
        config = AppConfig.from_settings(context.run_config)
        node = Node.of(facts, config, policy)
        torch.set_num_threads(1)
        request = TrainRequest.read(msg.content.config_records.get("config", ConfigRecord()), config.seed)
        start = read_arrays(msg.content.array_records.get("arrays", ArrayRecord()), torch.from_numpy)
        trained, state = prepare_upload(config, node, request, start)
        return _reply(msg, config, node, trained, state)
    except OneShotError as error:
        return failure(msg, client=name, reason=str(error))


@app.train("fens")
def fens(msg: Message, context: Context) -> Message:
    """Answer a request of FENS about the examples that this client held out of training."""
    from client_app.fens import FensClient
    from strategies.client.fens import answer

    try:
        facts = node_facts(context.node_config, context.run_config)
        local = FensClient(context.run_config, facts, node_policy(context.node_config, facts)).local()
    except OneShotError as error:
        return answer_question(msg, {"client": client_name(context.node_config), "error": str(error)}, ArrayRecord())
    return answer(msg, local)


@app.train("evaluate")
def evaluate(msg: Message, context: Context) -> Message:
    """Answer with the scores of a result on this client's own test examples."""
    import torch

    from client_app.evaluating import EvaluatingClient
    from strategies.client.evaluation import answer

    torch.set_num_threads(1)
    try:
        facts = node_facts(context.node_config, context.run_config)
        side = EvaluatingClient(context.run_config, facts, node_policy(context.node_config, facts)).side()
    except OneShotError as error:
        return answer_question(msg, {"client": client_name(context.node_config), "error": str(error)}, ArrayRecord())
    return answer(msg, side)


@app.train("head")
def head(msg: Message, context: Context) -> Message:
    """Answer with the sums of the last layer's inputs in the server's model."""
    import torch

    from client_app.last_layer import SummingClient

    said = dict(msg.content.config_records.get("config", ConfigRecord()))
    record, sums = {"client": client_name(context.node_config)}, dict[str, torch.Tensor]()
    torch.set_num_threads(1)
    try:
        facts = node_facts(context.node_config, context.run_config)
        record["client"] = client_name(facts)
        sent = read_arrays(msg.content.array_records.get("arrays", ArrayRecord()), torch.from_numpy)
        sums = SummingClient(context.run_config, facts, node_policy(context.node_config, facts)).sums(said, sent)
    except OneShotError as error:
        record["error"] = str(error)
    return answer_question(msg, record, ArrayRecord(sums))


@app.train("fusefl")
def fusefl(msg: Message, context: Context) -> Message:
    """Answer a question of FuseFL: train the next block on top of all clients' blocks, or send moments of features."""
    import torch

    from client_app.fusefl import answer
    from fl_app.config import AppConfig

    said = dict(msg.content.config_records.get("config", ConfigRecord()))
    record = {"client": client_name(context.node_config), "stage": said.get("stage", 0)}
    state = dict[str, torch.Tensor]()
    try:
        facts = node_facts(context.node_config, context.run_config)
        record["client"] = client_name(facts)
        config = AppConfig.from_settings(context.run_config)
        node = Node.of(facts, config, node_policy(context.node_config, facts))
        torch.set_num_threads(1)
        limit = float(facts.get("max-ensemble-mib", config.client.max_ensemble_mib))
        sent = read_arrays(msg.content.array_records.get("arrays", ArrayRecord()), torch.from_numpy)
        state = answer(config, node, said, sent, max_mib=limit)
    except OneShotError as error:
        record["error"] = str(error)
    return answer_question(msg, record, ArrayRecord(state))


@app.query()
def introduce(msg: Message, context: Context) -> Message:
    """Answer with this client's name."""
    try:
        name = client_name(node_facts(context.node_config, context.run_config))
    except OneShotError as error:
        return failure(msg, client=client_name(context.node_config), reason=str(error))
    return Message(RecordDict({"upload": upload_facts(client=name)}), reply_to=msg)


def _one_round(msg: Message, context: Context, facts: Mapping[str, Any], policy: NodePolicy) -> Message:
    """Answer one round of many: train the server's model further and send it back."""
    import torch

    from client_app.iterating import local_round
    from fl_app.config import AppConfig
    from strategies.client.corrections import read_round

    try:
        config, (said, sent) = AppConfig.from_settings(context.run_config), read_round(msg)
        node = Node.of(facts, config, policy)
        torch.set_num_threads(1)
        trained, records, metrics = local_round(config, node, TrainRequest.read(said, config.seed), said, sent)
        reply = _reply(msg, config, node, trained, records["arrays"])
        reply.content["metrics"] = MetricRecord({**reply.content.metric_records["metrics"], **metrics})
        reply.content.update({key: ArrayRecord(state) for key, state in records.items() if key != "arrays"})
        return reply
    except OneShotError as error:
        return failure(msg, client=client_name(facts), reason=str(error))


def _reply(msg: Message, config: AppConfig, node: Node, trained: Trained, state: dict[str, torch.Tensor]) -> Message:
    facts = trained.facts
    if facts.label_counts is not None:
        facts = replace(facts, label_counts=reported_counts(facts.label_counts, config.client, node.policy))
    if not reports_counts(config.client, node.policy):  # the names of a node's class folders tell which classes it has
        facts = replace(facts, agreement=facts.agreement.without_words())
    size = {} if facts.num_examples is None else {"num-examples": facts.num_examples}
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({**size, **trained.metrics})})
    content["upload"] = ConfigRecord(facts.to_record())
    return Message(content, reply_to=msg)

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

from client_app.node import Node, TrainRequest, reported_counts, reports_counts
from fl_app.node_config import client_name, is_deployed, node_facts, node_policy
from fl_app.project import FAILURES
from strategies.client import TORN, already_held, answer_question, failure, read_arrays, upload_facts
from strategies.core.errors import OneShotError
from strategies.core.facts import State
from strategies.core.processor import without_collections

if TYPE_CHECKING:
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
    with without_collections():
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

    return _answer_as(msg, context, lambda *own: FensClient(*own).local(), answer)


@app.train("evaluate")
def evaluate(msg: Message, context: Context) -> Message:
    """Answer with the scores of a result on this client's own test examples."""
    import torch

    from client_app.evaluating import EvaluatingClient
    from strategies.client.evaluation import answer

    torch.set_num_threads(1)
    return _answer_as(msg, context, lambda *own: EvaluatingClient(*own).side(), answer)


@app.train("head")
def head(msg: Message, context: Context) -> Message:
    """Answer with the sums of the last layer's inputs in the server's model."""
    from client_app.last_layer import SummingClient

    said = dict(msg.content.config_records.get("config", ConfigRecord()))

    def sums(facts: Mapping[str, Any], policy: NodePolicy, sent: State) -> State:
        return SummingClient(context.run_config, facts, policy).sums(said, sent)

    return _answer_with(sums, msg, context)


@app.train("fusefl")
def fusefl(msg: Message, context: Context) -> Message:
    """Answer a question of FuseFL: train the next block on top of all clients' blocks, or send moments of features."""
    from client_app.fusefl import answer
    from fl_app.config import AppConfig

    said = dict(msg.content.config_records.get("config", ConfigRecord()))

    def block(facts: Mapping[str, Any], policy: NodePolicy, sent: State) -> State:
        config = AppConfig.from_settings(context.run_config)
        limit = float(facts.get("max-ensemble-mib", config.client.max_ensemble_mib))
        return answer(config, Node.of(facts, config, policy), said, sent, max_mib=limit)

    return _answer_with(block, msg, context, stage=said.get("stage", 0))


def _answer_as(
    msg: Message, context: Context, side: Callable[..., Any], answer: Callable[[Message, Any], Message]
) -> Message:
    """Answer with what the library needs of this client, or with the reason why the node does not permit it."""
    try:
        facts = node_facts(context.node_config, context.run_config)
        own = side(context.run_config, facts, node_policy(context.node_config, facts))
    except OneShotError as error:
        return answer_question(msg, {"client": client_name(context.node_config), "error": str(error)}, ArrayRecord())
    return answer(msg, own)


def _answer_with(make: Callable[..., State], msg: Message, context: Context, **known: Any) -> Message:
    """Answer with the tensors that this client makes of its facts, its policy and the tensors that it is sent."""
    import torch

    record: dict[str, Any] = {"client": client_name(context.node_config), **known}
    made: State = {}
    torch.set_num_threads(1)
    try:
        facts = node_facts(context.node_config, context.run_config)
        record["client"] = client_name(facts)
        policy = node_policy(context.node_config, facts)
        sent = read_arrays(msg.content.array_records.get("arrays", ArrayRecord()), torch.from_numpy)
        made = make(facts, policy, sent)
    except OneShotError as error:
        record["error"] = str(error)
    return answer_question(msg, record, ArrayRecord(made))


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


def _reply(msg: Message, config: AppConfig, node: Node, trained: Trained, state: State) -> Message:
    facts = trained.facts
    if config.model.train:  # only weights are merged
        facts = replace(facts, label_counts=None)
    if facts.label_counts is not None:
        facts = replace(facts, label_counts=reported_counts(facts.label_counts, config.client, node.policy))
    if not reports_counts(config.client, node.policy):  # the names of a node's class folders tell which classes it has
        facts = replace(facts, agreement=facts.agreement.without_words())
    size = {} if facts.num_examples is None else {"num-examples": facts.num_examples}
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({**size, **trained.metrics})})
    content["upload"] = ConfigRecord(facts.to_record())
    return Message(content, reply_to=msg)

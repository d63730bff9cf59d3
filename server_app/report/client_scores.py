"""The scores of a result on the clients' own examples: facts, table, plot, and who gains and who loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from server_app.report.drawing import COLOURS, legend_beside, row_figure
from server_app.report.evaluation import Row
from server_app.report.tables import Table, gain_text, places_of, scale_of, titled, unit_of
from strategies.core.errors import shorten_list
from strategies.core.facts import HEADLINES
from strategies.scores.exchange import CHOICE, FEDAVG, OWN, RESULT, ClientScores, Evaluation
from strategies.scores.values import LOWER_IS_BETTER, Score, as_json, describe, gain, mean_of, scores_of, verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Facts = Mapping[str, Any]
_HALF = "Several results were scored together: one half of each client's test examples chooses, this one reports."


def evaluation_facts(
    evaluation: Evaluation, where: str, metric: str, classes: Sequence[str] = (), *, grouped: bool = False
) -> dict[str, Any]:
    """Return the entry "evaluation" of a result.

    Args:
        where: ``"clients"`` or ``"both"``.
        metric: The headline score, which the gains are in; of scores by a function of the user's own the first where
            it does not return this one.
        grouped: Whether examples have groups, such as patients; a client that shares less than all sums sends none.
    """
    pooled = {}
    if any(client.count for client in evaluation.clients):  # scores by a function of the user's own
        return _facts_of_values(evaluation, where, metric)
    for model in (OWN, FEDAVG, RESULT, CHOICE):
        if (sums := evaluation.pooled(model)) is not None:
            pooled[model] = {name: round(score.value, 6) for name, score in scores_of(sums).items()}
    if "auroc" in pooled.get(OWN, {}):  # each client's own model has a scale of its own, so their scores do not pool
        each = [scores_of(client.sums[OWN]).get("auroc") for client in evaluation.clients if OWN in client.sums]
        del pooled[OWN]["auroc"]
        if own := [score.value for score in each if score is not None]:  # no client may have two classes
            pooled[OWN]["auroc"] = round(fmean(own), 6)
    clients = [_client_facts(client, metric, classes) for client in evaluation.clients]
    described = {
        model: describe(sums, classes) for model in (FEDAVG, RESULT) if (sums := evaluation.pooled(model)) is not None
    }
    lone = [client.client for client in evaluation.clients if grouped and client.sums[RESULT].groups is None]
    line = "intervals count examples{}, not groups, which the answer lacks"
    for facts in clients:
        facts["notes"] += [line.format("")] * (facts["client"] in lone)
    for found in described.values():
        found["notes"] += [line.format(f" of {shorten_list(lone)}")] if lone else []
    return {
        "on": where,
        "metric": metric,
        "clients": clients,
        "pooled": pooled,
        "described": described,
        "refused": [{"client": name, "reason": reason} for name, reason in evaluation.refused.items()],
    }


def _facts_of_values(evaluation: Evaluation, where: str, metric: str) -> dict[str, Any]:
    """Return the entry of scores by a function of the user's own, as means over the clients, weighted by examples."""
    pooled = {
        model: {name: round(value, 6) for name, value in found.items()}
        for model in (OWN, FEDAVG, RESULT)
        if (found := evaluation.mean(model))
    }
    found = pooled.get(RESULT, {})
    clients = [
        {
            "client": client.client,
            "examples": client.examples,
            **{model: dict(client.values[model]) if model in client.values else None for model in (OWN, FEDAVG)},
            "result": dict(client.values[RESULT]),
            "scores": _bare(client.values[RESULT]),
            "gain": None,
        }
        for client in evaluation.clients
    ]
    described = {
        model: {"accuracy": round(100 * found["accuracy"], 2) if "accuracy" in found else None, "scores": _bare(found)}
        for model, found in pooled.items()
        if model != OWN
    }
    return {
        "on": where,
        "metric": metric if metric in found else next(iter(found), metric),
        "clients": clients,
        "pooled": pooled,
        "described": described,
        "mean-of": "clients",
        "refused": [{"client": name, "reason": reason} for name, reason in evaluation.refused.items()],
    }


def _bare(values: Mapping[str, float]) -> dict[str, Any]:
    """Return scores without intervals."""
    return {name: {"value": round(value, 6), "low": None, "high": None} for name, value in values.items()}


def client_rows(facts: Facts, title: str, kind: str) -> list[Row]:
    """Return the rows of the result table of a server without held-out examples: all clients' examples together."""
    models = [(FEDAVG, "FedAvg (one shot)", "baseline"), (RESULT, title, kind)]
    described = facts.get("described", {})
    return [Row.of(name, of, described[model]) for model, name, of in models if model in described]


def _client_facts(client: ClientScores, metric: str, classes: Sequence[str]) -> dict[str, Any]:
    values = {
        model: {name: round(score.value, 6) for name, score in scores_of(sums).items()}
        for model, sums in client.sums.items()
    }
    result, found = describe(client.sums[RESULT], classes), None
    if OWN in client.sums:
        found = gain(client.sums[OWN], client.sums[RESULT], client.pairs.get(OWN), metric)
    better = None if found is None else {"metric": metric, **found.as_json(), "verdict": verdict(found)}
    return {
        "client": client.client,
        "examples": client.examples,
        "own": values.get(OWN),
        "fedavg": values.get(FEDAVG),
        "result": values[RESULT],
        "scores": as_json(scores_of(client.sums[RESULT])),
        "gain": better,
        **{key: result[key] for key in ("confusion", "calibration-error", "notes") if key in result},
    }


def summary_line(facts: Facts) -> str:
    """Return who gains and who loses, in one sentence; empty where no client has compared its own model."""
    known = [client for client in facts["clients"] if client["gain"] is not None]
    if not known:
        return ""
    metric = facts["metric"]
    gains = [client for client in known if client["gain"]["verdict"] == "gains"]
    losses = [client for client in known if client["gain"]["verdict"] == "loses"]
    middle = median(client["gain"]["value"] for client in known)
    moves = f"{'gains' if middle >= 0 else 'loses'} {_points(abs(middle), metric)}"
    line = f"Joining helps {len(gains)} of {len(known)} clients; the median client {moves}"
    for client in losses[:3]:
        line += f"; {client['client']} loses {_points(-client['gain']['value'], metric)}"
    line += f"; {len(losses) - 3} more lose" if len(losses) > 3 else ""
    ties = len(known) - len(gains) - len(losses)
    line += f"; for {ties} the difference may be chance" if ties else ""
    rest = len(facts["clients"]) - len(known)
    line += f"; {rest} more cannot be compared" if rest else ""
    return f"{line}."


def client_lines(facts: Facts) -> list[str]:
    """Return the evaluation as lines of a log: each client, the sentence, the notes, and the clients without scores."""
    lines = [f"{client['client']}: {_cells(client, facts['metric'])}" for client in facts["clients"]]
    if line := summary_line(facts):
        lines.append(line)
    lines += facts.get("described", {}).get(RESULT, {}).get("notes", [])
    return [*lines, *missing_lines(facts)]


def missing_lines(facts: Facts) -> list[str]:
    """Return a line for each client without scores, and why it has none."""
    return [f"not evaluated: {row['client']}: {row['reason']}" for row in facts["refused"]]


def chosen_of(results: Sequence[Facts]) -> str:
    """Return the folder of the best of several results on the half of the examples that chooses; empty if unknown.

    Of a score of the user's own it is not known whether more is better, so none is chosen by it.
    """
    scores = {}
    for result in results:
        facts = result["evaluation"]
        if facts["metric"] in HEADLINES and (score := facts["pooled"].get(CHOICE, {}).get(facts["metric"])) is not None:
            scores[result["run_dir"]] = -score if facts["metric"] in LOWER_IS_BETTER else score
    return max(scores, key=lambda name: scores[name]) if len(scores) == len(results) > 1 else ""


def results_table(results: Sequence[Facts]) -> Table:
    """Return a row per result that clients have scored: its scores, and how many clients it helps."""
    rows, chosen = [], chosen_of(results)
    for result in results:
        facts = result["evaluation"]
        clients, metric = facts["clients"], facts["metric"]
        verdicts = [client["gain"]["verdict"] for client in clients if client["gain"] is not None]
        worst = max if metric == "log-loss" else min
        figures = [_number(facts["pooled"].get(RESULT), metric)]
        figures += [_over(clients, RESULT, metric, choose) for choose in (fmean, worst)]
        counts = [str(verdicts.count(word)) for word in ("gains", "ties", "loses")]
        if "mean-of" in facts:  # whether more of such a score is better is not known
            figures[2], counts = "-", ["-"] * 3
        mark = ", chosen" if result["run_dir"] == chosen else ""
        rows.append((f"{result['method']}, seed {result['seed']}{mark}", *figures, *counts))
    columns = ("result", "all examples", "mean of clients", "worst client", "gain", "tie", "lose")
    metric = results[0]["evaluation"]["metric"]
    notes = ["The best of several results on the same examples looks better than it is."] if len(rows) > 1 else []
    notes = ["One half of each client's test examples has chosen; the table counts the other."] if chosen else notes
    return Table(f"On the clients' own examples: {titled(metric)}", columns, rows, texts=1, notes=notes)


def _cells(client: Facts, metric: str) -> str:
    found, count = client["gain"], client["examples"]
    parts = [f"own model {_number(client['own'], metric)}"] if client["own"] else []
    parts.append(f"result {_number(client['result'], metric)}")
    parts += [] if found is None else [f"gain {gain_text(found, metric)}"]
    parts += [] if metric in client["result"] else client.get("notes", [])
    return f"{titled(metric, f'{count} own examples')}: {', '.join(parts)}"


def client_table(facts: Facts) -> list[Table]:
    """Return the table with a row per client and those of the federation; none without scores of clients."""
    clients, metric = facts["clients"], facts["metric"]
    if not clients:
        return []
    rows = []
    for client in clients:
        found = client["gain"]
        numbers = [_number(client[model], metric) for model in (OWN, FEDAVG, RESULT)]
        rows.append(
            (client["client"], str(client["examples"]), *numbers, "-" if found is None else gain_text(found, metric))
        )
    pooled = facts["pooled"]
    together = [_number(pooled.get(model), metric) for model in (OWN, FEDAVG, RESULT)]
    rows.append(("all examples", str(sum(client["examples"] for client in clients)), *together, "-"))
    ends: list[tuple[str, Callable[[list[float]], float]]] = [("mean of clients", fmean)]
    if not (own := "mean-of" in facts):  # whether more of such a score is better is not known
        ends.append(("worst client", max if metric == "log-loss" else min))
    for name, choose in ends:
        cells = [_over(clients, model, metric, choose) for model in (OWN, FEDAVG, RESULT)]
        rows.append((name, "", *cells, _mean_gain(clients) if choose is fmean else "-"))
    notes = (
        [
            "The row of all examples has the clients' mean, weighted by their examples. The server cannot verify what "
            "a client reports, and one that reports falsely can move that row by any amount."
        ]
        if own
        else [
            "Gains have 95 % intervals of the same examples under both models; the mean's is for these clients.",
            "The server cannot verify what a client reports; an attacker moves the row of all examples by its share of "
            "them, and the mean of clients is not the score of all examples.",
        ]
    )
    if metric == "auroc" and OWN in pooled:
        notes.append("The own models' AUROC of all examples is the mean of clients: each has a scale of its own.")
    if any("-" in row[2:5] for row in rows[: len(clients)]):
        notes.append(
            "A dash is a score that is not known: the client has no such model or shares less"
            + (", or its examples are all of one class." if metric == "auroc" else ".")
        )
    notes += [_HALF] if CHOICE in pooled else []
    notes += [summary_line(facts)] if summary_line(facts) else []
    notes += [f"Not evaluated: {row['client']}, {row['reason']}." for row in facts["refused"]]
    columns = ["client", "examples", "own model", "FedAvg", "result"]
    if own:
        rows = [row[: len(columns)] for row in rows]
    else:
        columns.append(f"gain in {unit_of(metric, apart=True)}")
    return [
        Table(f"On the clients' own examples: {titled(metric)}", columns, rows, notes=notes,
              strong=frozenset({len(clients)}))
    ]  # fmt: skip


def confusion_tables(facts: Facts, classes: Sequence[str], most: int) -> list[Table]:
    """Return the confusion matrix of the result at each client, where it is shared and small enough."""
    found = []
    for client in facts["clients"]:
        table = client.get("confusion", ())
        if not 0 < len(table) <= most:
            continue
        names = classes or [str(label) for label in range(len(table))]
        rows = [(name, *map(str, row)) for name, row in zip(names, table, strict=True)]
        accuracy = client["scores"]["accuracy"]
        ends = f"{100 * accuracy['low']:.1f} to {100 * accuracy['high']:.1f}"
        notes = [f"Accuracy {100 * accuracy['value']:.1f} %, 95 % within {ends}"]
        if errors := client.get("calibration-error"):
            notes.append(f"calibration error {errors['value']:.3f}, of a calibrated model {errors['calibrated']:.3f}")
        notes = ["; ".join([*notes, *client.get("notes", ())]) + "."]
        found.append(Table(f"{client['client']}: true classes (rows) and predictions", ("", *names), rows, notes=notes))
    return found


def plot_clients(facts: Facts) -> Figure:
    """Draw a line per client from the score of its own model to that of the result, and its gain's interval there."""
    clients, metric = facts["clients"], facts["metric"]
    figure, axes, points = row_figure([client["client"] for client in clients])
    for place, client in enumerate(clients):
        ends = [client[model].get(metric) if client[model] else None for model in (OWN, RESULT)]
        shown = [None if end is None else end * scale_of(metric) for end in ends]
        own, result = shown
        if own is not None and result is not None:
            axes.plot([own, result], [place, place], color=COLOURS["client"], linewidth=2.5, zorder=1)
            if (found := client["gain"]) is not None:  # a gain in log loss is what the result has less of it
                sign, most = (-1, math.inf) if metric in LOWER_IS_BETTER else (1, 1.0)
                reach = [own + sign * scale_of(metric) * found[end] for end in ("low", "high")]
                reach = [min(max(end, 0.0), most * scale_of(metric)) for end in reach]
                interval = "95 % interval of the gain"
                axes.plot(reach, [place, place], color="black", linewidth=1.0, zorder=3, label=interval)
        # The own model's dot is larger, so that a result of equal score leaves it in sight.
        for value, colour, name, size in ((own, "baseline", "own model", 90), (result, "student", "result", 30)):
            if value is not None:
                axes.scatter([value], [place], s=size, color=COLOURS[colour], label=name, zorder=2, clip_on=False)
        if own is None and result is None:
            at = axes.get_yaxis_transform()
            axes.text(0.01, place, "not known", transform=at, va="center", size=points, color=COLOURS["client"])
    axes.set_xlabel(titled(metric, "the client's own examples"))
    axes.set_title("What each client gains")
    legend_beside(axes)
    return figure


def _number(values: Mapping[str, float] | None, metric: str) -> str:
    value = (values or {}).get(metric)
    return "-" if value is None else f"{value * scale_of(metric):.{places_of(metric) - 1}f}"


def _over(clients: Sequence[Facts], model: str, metric: str, choose: Callable[[list[float]], float]) -> str:
    values = [client[model][metric] for client in clients if client[model] and metric in client[model]]
    return _number({metric: choose(values)}, metric) if values else "-"


def _points(value: float, metric: str) -> str:
    return f"{value * scale_of(metric):.{places_of(metric) - 1}f} {unit_of(metric, apart=True)}"


def _mean_gain(clients: Sequence[Facts]) -> str:
    gains = [client["gain"] for client in clients if client["gain"] is not None]
    if not gains:
        return "-"
    mean = mean_of([Score(gain["value"], gain["low"], gain["high"]) for gain in gains])
    return gain_text(mean.as_json(), gains[0]["metric"])

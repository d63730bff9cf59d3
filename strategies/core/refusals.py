"""Every reason for which an upload, an answer or a request is refused.

One function per reason returns the :class:`.errors.UploadError` to raise. Its one line says what was found, where, and
what it must be; :meth:`.errors.UploadError.of` puts the client's name before it. Nothing else makes an UploadError, so
this module is the list of all refusals, in the order of an upload's way: the client's name, the form of its answer, its
facts, arrays and sums, the disk, later answers, and what a client refuses to do for the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .durable import MIB
from .errors import UploadError, shorten_list


def _cut(value: object, width: int = 80) -> str:
    return f"{value!r:.{width}}"


# The client's name.


def bad_name(what: str, name: object, pattern: str) -> UploadError:
    """``what`` is the field that holds the name."""
    return UploadError(f"{what} is {_cut(name)}: must be a name that matches {pattern}")


def reserved_name(name: str) -> UploadError:
    """The server gives such names to clients that send none."""
    return UploadError(
        f"upload.client is {name!r}: must be another name, because names that start with 'anonymous-' are reserved"
    )


def changed_name(client: str, own: str) -> UploadError:
    return UploadError(f"it answers as {client!r} and was {own!r} before: must keep its name")


def no_upload_of(client: str) -> UploadError:
    """A client answers a question after the upload phase without having uploaded."""
    return UploadError(f"it answers as {client!r}, and no upload has this name: must have uploaded")


def second_answer() -> UploadError:
    return UploadError("two nodes answer under this name, the second is refused")


def second_upload() -> UploadError:
    return UploadError("its upload is already here, a second one is refused")


def same_file(other: str) -> UploadError:
    """The disk ignores case, and the names differ in case alone."""
    return UploadError(f"the file system cannot tell this client's file from that of {other}")


# The form of an answer.


def client_error(reason: object) -> UploadError:
    """The client itself reports why it has no answer."""
    return UploadError(str(reason)[:500] or "no reason given")


def no_answer(timeout_s: float) -> UploadError:
    return UploadError(f"no answer within {timeout_s:.0f} s")


def node_left() -> UploadError:
    return UploadError("the node has left")


def lost_answer(what: str, times: int) -> UploadError:
    """The node was lost at every question; ``what`` says what failed."""
    return UploadError(f"{what}, {times} times" if times > 1 else what)


def not_back(what: str) -> UploadError:
    """The node was lost while it was asked, and not connected again before the others had answered."""
    return UploadError(f"{what}, and it has not come back")


def unreadable_answer(error: str) -> UploadError:
    """Flower could not inflate or decode the answer."""
    return UploadError(f"its answer cannot be read: {error}")


def too_many_objects(most: int) -> UploadError:
    return UploadError(f"its answer names more than {most} objects")


def too_deep(deepest: int) -> UploadError:
    return UploadError(f"its answer is nested deeper than {deepest} objects, must be as Flower sends it")


def long_record(size: int, most: int) -> UploadError:
    return UploadError(
        f"a record of its answer has {size / MIB:.1f} MiB of numbers and texts, must be at most {most // MIB} MiB"
    )


def large_answer(most: int) -> UploadError:
    """The objects of an answer have more bytes than an upload may have, on the wire or inflated."""
    return UploadError(f"its answer is larger than {most / MIB:.1f} MiB (max-upload-mib)")


def too_large(what: str, size: int, most: int) -> UploadError:
    """The weights have more bytes than an upload may have; ``what`` is a plural."""
    return UploadError(f"{what} are {size / MIB:.1f} MiB, must be at most {most / MIB:.1f} MiB (max-upload-mib)")


def no_single_record(count: int) -> UploadError:
    return UploadError(f"the reply has {count} array records, must be one, named 'arrays'")


def missing_record(name: str) -> UploadError:
    return UploadError(f"the array record {name!r} is missing from the answer")


def held_without_name() -> UploadError:
    return UploadError("upload.held needs upload.client, which is missing")


def not_held() -> UploadError:
    """The client believes that the server holds its upload."""
    return UploadError("upload.held is true, but its upload is not here")


# The facts of an upload.


def bad_size(what: str, value: object) -> UploadError:
    """The number of examples is missing, or no number of examples; ``what`` names the field."""
    return UploadError(f"{what} is {'missing' if value is None else _cut(value)}: must be a positive whole number")


def no_size(key: str, others: Sequence[str]) -> UploadError:
    """The metrics lack the number of examples; it may have one of the other names."""
    return UploadError(
        f"metrics lack {key!r} and have {shorten_list(others)}: must have the number of training examples, under the "
        "name that the strategy's weighted_by_key says"
    )


def bad_label_counts(counts: object, num_classes: int) -> UploadError:
    return UploadError(f"label-counts is {str(counts)[:80]}: must be {num_classes} whole numbers from 0")


def sizes_differ(total: int, num_examples: int) -> UploadError:
    return UploadError(f"label-counts sum to {total}, but num-examples is {num_examples}: must be equal")


def bad_range_layers(what: str, layers: object, most: int, longest: int) -> UploadError:
    return UploadError(
        f"{what}: the layers are {_cut(layers)}: must be at most {most} different names of at most {longest} letters"
    )


def bad_ranges(what: str, bounds: object, layers: int) -> UploadError:
    return UploadError(f"{what} are {_cut(bounds)}: must be two real numbers for each of {layers} layers")


def bad_range(what: str, layer: str, low: float, high: float) -> UploadError:
    return UploadError(f"{what} of layer {layer[:80]!r} are {low} and {high}: must be finite, smallest first")


def bad_words(what: str, words: object, most: int, longest: int) -> UploadError:
    """``what`` is the list's name, such as ``classes``."""
    return UploadError(f"upload.{what} is {_cut(words)}: must be up to {most} texts of at most {longest} letters each")


def bad_words_digest(what: str, digest: object) -> UploadError:
    """``what`` is the list's name; the digest is no sha256, or not that of the list."""
    return UploadError(f"upload.{what}-sha256 is {_cut(digest)}: must be the sha256 of upload.{what}, in hex")


def other_agreement(what: str, whose: str, difference: str) -> UploadError:
    """A client's classes or preprocessing are not those of the server, or of another client.

    Args:
        what: ``classes`` or ``preprocessing``.
        whose: The party with which they are compared.
        difference: The first difference, as a clause.
    """
    remedy = "must be the same for all parties, in the same order, because a model knows only numbers"
    return UploadError(f"its {what} differ from those of {whose}: {difference:.400}: {remedy}")


def bad_start(value: object) -> UploadError:
    return UploadError(f"upload.start is {_cut(value)}: must be a sha256 in 64 hex digits, as upload_facts() makes it")


def other_start(found: str, expected: str) -> UploadError:
    """A client's training began from other weights than those of the run, so that its update means nothing here."""
    return UploadError(
        f"its training started from weights with sha256 {found[:12]}, those of this run have {expected[:12]}: must "
        "start from the weights that the server sends"
    )


def unknown_architecture(named: object, known: Iterable[str]) -> UploadError:
    return UploadError(f"upload.architecture is {str(named)[:80]!r}, known here are {', '.join(known)}")


def no_architecture(fitting: Sequence[str]) -> UploadError:
    found = f"{', '.join(fitting)} fit" if fitting else "none fits"
    return UploadError(f"upload.architecture is missing and of the known ones {found}; must be one")


def fits_no_architecture(fitting: Sequence[str], known: Iterable[str]) -> UploadError:
    return UploadError(f"its tensors fit {' and '.join(fitting) or 'none'} of {', '.join(known)}: must fit one")


# The arrays.


def other_keys(what: str, missing: Sequence[str], extra: Sequence[str]) -> UploadError:
    """Arrays are missing, or too many; ``what`` says which arrays do not fit which architecture."""
    unnamed = missing and extra and all(name.isdecimal() for name in extra)  # of a list of arrays
    remedy = "; must have the model's names, as ArrayRecord(model.state_dict()) gives them" if unnamed else ""
    return UploadError(f"{what}: missing {shorten_list(missing)}; not expected {shorten_list(extra)}{remedy}")


def several_prefixes(prefixes: Sequence[str]) -> UploadError:
    """A file holds two models, such as a student and its teacher, under these prefixes."""
    return UploadError(
        f"the model's tensors are there under {shorten_list([repr(prefix) for prefix in prefixes])}: must be there "
        "once; save the right ones alone, or set the others to false in the 'keys' of an import's map"
    )


def several_models(keys: Sequence[str]) -> UploadError:
    """A training script's checkpoint holds several models, under these keys."""
    return UploadError(
        f"it holds models under {shorten_list([repr(key) for key in keys])}: must be one model; save the right one "
        f"alone, as with torch.save(checkpoint[{keys[0]!r}], path)"
    )


def misfits(what: str, wrong: Sequence[str]) -> UploadError:
    """Arrays have another shape or dtype than the architecture's; each entry says which."""
    return UploadError(f"{what}: {shorten_list(wrong, 160)}")


def other_form(where: str, found: str, expected: str) -> UploadError:
    return UploadError(f"{where} is {found}, expected is {expected}")


def other_header(where: str, found: str, expected: str) -> UploadError:
    """An array's own header differs from the one that its shape and dtype have; pickled objects end here."""
    return UploadError(f"{where} holds {found!r}, expected is {expected!r}")


def no_numpy_array(where: str, stype: str, begin: bytes, expected: bytes) -> UploadError:
    """An array's bytes are not in numpy's format."""
    return UploadError(
        f"{where} is {stype[:80]!r} beginning with {begin!r}: must be 'numpy.ndarray' beginning with {expected!r}"
    )


def other_length(where: str, size: int, expected: int) -> UploadError:
    return UploadError(f"{where} has {size} bytes of values, expected are {expected}")


def not_finite(what: str) -> UploadError:
    return UploadError(f"{what} holds NaN or Inf: must be finite values")


def negative_variance(what: str) -> UploadError:
    """A batch normalisation's variance is negative: its root would be NaN."""
    return UploadError(f"{what} holds a negative variance: must be at least 0")


def outputs_overflow(largest: float, most: str) -> UploadError:
    """Finite weights make outputs that are not finite, or too large; ``largest`` is the largest weight."""
    return UploadError(
        "arrays are finite, but the model's outputs for normal noise are not "
        f"(largest value {largest:.3g}): must be weights of a trained model{most}"
    )


def misfit_weights(what: str, architecture: str, error: object) -> UploadError:
    """A model of this architecture does not take the weights; ``error`` is torch's."""
    return UploadError(f"{what} does not fit {architecture!r}: {error}")


def no_float32(what: str, dtype: str) -> UploadError:
    """The architecture itself has a dtype that numpy lacks."""
    return UploadError(f"{what} is {dtype} in the architecture: must be float32")


def not_dense(what: str, kind: str) -> UploadError:
    """A tensor cannot be an array of numpy."""
    return UploadError(f"{what} is {kind}: must be a dense tensor of a dtype that numpy has")


def no_tensor(what: str, kind: str) -> UploadError:
    return UploadError(f"{what} is {kind}: must be a dense tensor with a name and with values, on any device but meta")


def same_tensor_name(one: str, other: str, name: str) -> UploadError:
    """The prefixes of an import map give two tensors one name."""
    return UploadError(f"tensors {one!r} and {other!r} both become {name!r}; must be one name per tensor")


# Compressed arrays: INT8 and sparse updates.


def looks_quantized(key: str, dtype: object, suffix: str) -> UploadError:
    """A tensor to quantise would be taken for a quantised one, or for its scale."""
    return UploadError(f"tensor {key!r} of type {dtype}: must be no int8, and no name with {suffix!r}")


def bad_scale(key: str, scale: object) -> UploadError:
    return UploadError(f"array {key!r} of int8 has the scale {scale}: must be one positive number")


def scale_of_none(key: str, found: str) -> UploadError:
    return UploadError(f"array {key!r} is a scale of {found}: must be one of int8")


def no_torch_array(key: str, error: object) -> UploadError:
    return UploadError(f"array {key!r} is not a tensor: {error}")


def activations_overflow(layer: str) -> UploadError:
    """The client's own examples overflow in a layer, so it has no range."""
    return UploadError(f"layer {layer!r} gives NaN or Inf on the own examples: must be finite values")


# Sums of features.


def other_features(found: str, expected: str, difference: str) -> UploadError:
    """The sums are of another feature function; the first two arguments are short fingerprints."""
    return UploadError(
        f"its features come from another function: fingerprint {found}, expected is {expected}; they differ in "
        f"{difference}"
    )


def beyond_noise(found: str, most: str) -> UploadError:
    """Neither examples nor the noise of the budget explain such sums."""
    return UploadError(f"{found}: examples and noise explain {most}")


def nothing_to_combine(reason: str) -> UploadError:
    """No upload is left that a method could combine."""
    return UploadError(f"{reason}: nothing to combine")


# The disk.


def not_stored(reason: str, file: Path, needed: int, free: object) -> UploadError:
    """The disk refuses the upload; sizes are in bytes."""
    return UploadError(f"{reason}, its upload is not stored in {file}: {needed} bytes needed, {free} bytes free")


# Checkpoint files.


def no_checkpoint(path: Path, reason: str, allowed: str) -> UploadError:
    """A file is missing, or not weights; ``reason`` follows its path."""
    return UploadError(f"checkpoint {path} {reason}: {allowed}")


def bad_adapter(what: str, found: str, rule: str) -> UploadError:
    """An adapter cannot be merged; ``rule`` follows "must"."""
    return UploadError(f"{what} is {found}: must {rule}")


# Answers after the upload: rounds, FENS, FuseFL, scores.


def no_training() -> UploadError:
    return UploadError("it trained nothing in this round, which is all that a round asks for")


def bad_metric(key: str, value: object, rule: str) -> UploadError:
    """A number that the server computes with is missing or out of range."""
    return UploadError(f"metrics[{key[:80]!r}] is {str(value)[:40]}: must be {rule}")


def lacks_numbers(keys: Sequence[str]) -> UploadError:
    """A project's own average may need numbers that most clients send and this one does not."""
    return UploadError(
        f"its numbers lack {', '.join(keys)}, which the strategy may compute with and most clients send as a finite "
        "number"
    )


def bad_score(key: str, value: object, rule: str) -> UploadError:
    """A score, or the number of examples that it is weighted with, would spoil the average of all clients."""
    return UploadError(f"scores: {bad_metric(key, value, rule).reason}")


def no_scores(found: str, rule: str) -> UploadError:
    """An evaluation's answer holds no single record of scores."""
    return UploadError(f"scores: {found}: must {rule}")


def broken_rule(found: str, rule: str) -> UploadError:
    """Arrays, sums, blocks or an answer are not what they must be."""
    return UploadError(f"{found}: must be {rule}")


def refused(reason: object) -> UploadError:
    """Another part has found the reason: the store, an import, or the digests of an ensemble."""
    return UploadError(str(reason))


def contradicting_sums(what: str, found: str) -> UploadError:
    """A client's sums of its evaluation cannot be those of its examples."""
    return UploadError(f"the evaluation of {what} {found}: must be sums over the same examples that fit each other")


def lost_logits(times: int) -> UploadError:
    return UploadError(
        f"it received the ensemble {times} times and has no logits of it: must keep them in its state folder"
    )


# What a client refuses: the server's request.


def bad_request(key: str, value: object, rule: str) -> UploadError:
    """An entry of the server's request is missing or out of range."""
    return UploadError(f"the server's {key} is {_cut(value)}: must be {rule}")


def unknown_question(key: object) -> UploadError:
    return UploadError(f"the server's question has a missing or unknown {key!r}")


def unreadable_array(key: str, error: object) -> UploadError:
    return UploadError(f"the server's array {key[:80]!r} cannot be read: {error!s:.200}")


def other_shapes(what: str, expected: str) -> UploadError:
    return UploadError(f"the server's {what} other names or shapes than {expected}")


def bad_generator(problem: str) -> UploadError:
    """The server's generator does not fit its description, or the client's model."""
    return UploadError(f"the server's generator {problem}")


def misfit_aggregator(name: str, error: object) -> UploadError:
    """FENS's aggregator does not take the ensemble's logits."""
    return UploadError(f"the server's aggregator {name[:80]!r} does not fit the logits: {error}")


def beyond_limit(what: str, size: float, most: float) -> UploadError:
    """The node's limit on ensembles and blocks; sizes in MiB."""
    return UploadError(f"{what} {size:.1f} MiB: must be at most {most:g} MiB on this node")


def lost_state(what: str) -> UploadError:
    """The client's disk no longer has what the request builds on."""
    return UploadError(f"the client lacks {what}")


def no_steps(travel: float) -> UploadError:
    """Control variates divide by the length of the local steps."""
    return UploadError(f"the length of the local steps is {travel}: must be above 0, counted by step(lr)")


def no_part(reason: str) -> UploadError:
    """The client has no held-out examples that it may answer with."""
    return UploadError(f"{reason}: it takes no part in the rounds")


def too_few_test_examples(least: int) -> UploadError:
    """The client has fewer test examples than its node evaluates on; the number itself stays there."""
    least = max(1, least)
    return UploadError(f"the client's test examples are too few: must be at least {least} ('min-test-examples')")


def asked_too_often(most: int) -> UploadError:
    """Another question about the client's test examples; each answer tells a little more of them."""
    return UploadError(f"the client has answered {most} evaluations of this run: must be asked no other one")


def evaluation_not_permitted() -> UploadError:
    return UploadError("this node takes no part in evaluations: its 'may-evaluate' is false")


def bad_labels(shape: Sequence[int], count: int) -> UploadError:
    """A project's own function returns labels that are not one per input."""
    return UploadError(f"the client's labels have shape {list(shape)}: must be [{count}], one for each input")


# What a client refuses: its own limits, data and disk.


def not_permitted(setting: str, value: object, rule: str) -> UploadError:
    """A setting of the run goes beyond what the node's config permits."""
    return UploadError(f"setting {setting!r} is {value}: must be {rule}")


def architecture_not_permitted(name: str, permitted: str) -> UploadError:
    return UploadError(f"architecture {name[:80]!r} is not permitted on this node: must be {permitted}")


def other_folder(name: str, found: str, wanted: str) -> UploadError:
    return UploadError(
        f"the files in folder {name[:200]!r} have the digest {found[:12]} on this client and {wanted[:12]} on the "
        "server: must be the same config, weights, tokenizer and preprocessing"
    )


def unreadable_on_node(what: str) -> UploadError:
    """A deployed node does not tell its server what is wrong with its files."""
    return UploadError(f"{what} cannot be read on this node; its log has the reason")


def counts_not_shared(what: str) -> UploadError:
    """The answer would hold exact label counts, which the client keeps to itself."""
    return UploadError(f"this client does not share its examples per class, which are part of {what}")


def too_few_examples(least: int) -> UploadError:
    """Sums over so few examples would reveal much of each; their number is not said."""
    return UploadError(f"it has fewer examples than 'features.min-examples', {least}, so it sends nothing")


def no_features() -> UploadError:
    return UploadError("none of its examples has features, so it sends nothing")


def bad_setting(what: str, value: object, rule: str) -> UploadError:
    """A setting of the client's own, or of a simulated attack, does not fit this request."""
    return UploadError(f"{what} is {value}: must be {rule}")


def no_honest_client() -> UploadError:
    return UploadError("attack.clients names every client: must leave one honest client with 'attack.kind' 'copy'")


def not_kept(what: str, error: object, so: str) -> UploadError:
    """The disk refuses a file without which the client must not answer."""
    return UploadError(f"{what} cannot be kept, so {so}: {error}")


# What a client refuses: differential privacy.


def not_private(what: str) -> UploadError:
    """The server asks for something outside the privacy guarantee."""
    return UploadError(
        f"the server asks for {what}: must be one upload of a classifier, or of sums of features without squares, "
        "with privacy.epsilon"
    )


def spent_twice() -> UploadError:
    return UploadError("the kept model of this run cannot be read: training again would spend the privacy twice")


def no_ledger(verb: str, error: object) -> UploadError:
    return UploadError(f"the privacy ledger cannot be {verb}, so nothing is sent: {error}")


def no_opacus() -> UploadError:
    return UploadError("privacy.epsilon needs opacus, which is not installed here: pip install 'oneshot-fl[privacy]'")


def no_private_training(reason: str) -> UploadError:
    return UploadError(f"privacy.epsilon: {reason}")

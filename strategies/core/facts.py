"""An upload and its facts, one value from the message over the index to the method; the input space of models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from . import refusals
from .errors import OptionError, shorten_list

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]
ModelBuilder = Callable[[], "torch.nn.Module"]
CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Layers whose ranges one client may send, and the letters of a layer's name.
MAX_LAYERS = 4096
MAX_LAYER_NAME = 256
# Words of one list of an agreement that one client may send, and the letters of a word; longer lists go as a digest.
MAX_WORDS = 4096
MAX_WORD = 256
SHA256 = re.compile(r"[0-9a-f]{64}")
EXPECTED = "expected-"  # before the names of the server's own lists in its requests


def held_digest(client: str, run_id: str) -> str:
    """Return the digest that stands for a client's name in a request, so that a node reads no other client's name.

    Args:
        run_id: The run folder's id, which makes the digests of two runs differ.
    """
    return hashlib.sha256(f"{run_id}/{client}".encode()).hexdigest()


class Normalization(NamedTuple):
    """How pixels in [0, 1] become a model's input: ``(pixel - mean) / std``, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def half(cls, channels: int) -> Normalization:
        """Return mean and deviation 0.5 per channel, the default."""
        return cls((0.5,) * channels, (0.5,) * channels)

    @classmethod
    def identity(cls, channels: int) -> Normalization:
        """Return mean 0 and deviation 1 per channel, which change nothing."""
        return cls((0.0,) * channels, (1.0,) * channels)


@dataclass(frozen=True)
class Words:
    """An ordered list of words that all parties of a run must share, or its digest alone.

    Attributes:
        sha256: Digest of the words in their order, in hex; empty where the party names none.
        words: The words; empty where the party keeps them to itself.
    """

    sha256: str = ""
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> Words:
        """Return words with their digest; no words: the empty value."""
        own = tuple(map(str, words))
        return cls(hashlib.sha256(json.dumps(own).encode()).hexdigest() if own else "", own)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], name: str) -> Words:
        """Check what a client says of a list of words, whatever it is.

        Raises:
            UploadError: They are no words, or the digest is not theirs.
        """
        words, digest = record.get(name, []), record.get(f"{name}-sha256", "")
        texts = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
        fits = isinstance(words, list) and len(texts) == len(words) <= MAX_WORDS and max(map(len, texts), default=0)
        if words != [] and not (fits and fits <= MAX_WORD):
            raise refusals.bad_words(name, words, MAX_WORDS, MAX_WORD)
        found = cls.of(texts)
        if digest and not (isinstance(digest, str) and SHA256.fullmatch(digest) and found.sha256 in ("", digest)):
            raise refusals.bad_words_digest(name, digest)
        return found if texts else cls(digest)

    def to_record(self, name: str) -> dict[str, Any]:
        """Return the entries of a client's record: the digest, and the words unless they are kept or too many."""
        if not self.sha256:
            return {}
        sendable = 0 < len(self.words) <= MAX_WORDS and max(map(len, self.words)) <= MAX_WORD
        return {f"{name}-sha256": self.sha256, **({name: list(self.words)} if sendable else {})}


@dataclass(frozen=True)
class Agreement:
    """What all parties of a run must share beside the model.

    Attributes:
        classes: The names of the classes, in the order of their numbers.
        preprocessing: How an example becomes a model's input, in words that all parties write alike.
    """

    classes: Words = Words()
    preprocessing: Words = Words()

    @classmethod
    def of(cls, classes: Sequence[str] = (), preprocessing: Sequence[str] = ()) -> Agreement:
        """Return the agreement of a party that names its classes and its preprocessing."""
        return cls(Words.of(classes), Words.of(preprocessing))

    @classmethod
    def of_file(cls, classes: Sequence[str], other: Agreement) -> Agreement:
        """Return the agreement of a model's file, to compare with another party's.

        Args:
            other: The other party's. Data sets without names number their classes, which no names contradict.
        """
        words = other.classes.words
        numbered = words == tuple(map(str, range(len(words)))) and len(words) in (0, len(classes))
        return cls() if numbered and not all(name.isdecimal() for name in classes) else cls.of(classes)

    @property
    def parts(self) -> dict[str, Words]:
        """Its lists by name."""
        return {"classes": self.classes, "preprocessing": self.preprocessing}

    def to_record(self, prefix: str = "") -> dict[str, Any]:
        """Return the entries of a record: its lists, each under its name after the prefix, and their digests."""
        return {key: said for name, part in self.parts.items() for key, said in part.to_record(prefix + name).items()}

    def without_words(self) -> Agreement:
        """Return its digests alone."""
        return Agreement(*(Words(part.sha256) for part in self.parts.values()))


UNNAMED = Agreement()


def unnamed_note(unnamed: Sequence[str], number: int) -> list[str]:
    """Return a line about the models that name no classes where others do; no line if all or none do."""
    if not 0 < len(unnamed) < number:
        return []
    return [f"{shorten_list(unnamed)} name no classes: taken to be those of the others, in their order"]


class Agreed:
    """What the uploads of a run must share: the server's agreement, and where it has none, that of the first upload."""

    def __init__(self, own: Agreement, whose: str = "the server") -> None:
        self._known = {name: (whose, part) for name, part in own.parts.items() if part.sha256}

    def check(self, found: Agreement) -> None:
        """Refuse an upload whose classes or preprocessing are others; what it does not name is not compared.

        Raises:
            UploadError: Names the first difference.
        """
        for name, part in found.parts.items():
            whose, wanted = self._known.get(name, ("", part))
            if part.sha256 and part.sha256 != wanted.sha256:
                raise refusals.other_agreement(name, whose, _first_difference(part, wanted, name))

    @property
    def known(self) -> Agreement:
        """What the parties of the run share; of a client's own words the digest alone, which other clients may see."""
        parts = {
            name: part if whose == "the server" else Words(part.sha256) for name, (whose, part) in self._known.items()
        }
        return Agreement(**parts)

    def add(self, client: str, found: Agreement) -> None:
        """Compare later uploads with this accepted one, in what no earlier party named."""
        for name, part in found.parts.items():
            if part.sha256:
                self._known.setdefault(name, (f"client {client!r}", part))


def _first_difference(found: Words, wanted: Words, name: str) -> str:
    """Return the first place where two lists differ, as a clause; their lengths where one is not sent."""
    if not (found.words and wanted.words):
        return f"their sha256 are {found.sha256[:12]} and {wanted.sha256[:12]}, and the names are not sent"
    number = next((k for k, pair in enumerate(zip(found.words, wanted.words, strict=False)) if pair[0] != pair[1]), -1)
    one = "class" if name == "classes" else "line"
    if number < 0:
        number = min(len(found.words), len(wanted.words))
        longer, where = (found, "not there") if len(found.words) > number else (wanted, "not here")
        text = f"{one} {number}, {longer.words[number]!r:.80}, is {where}"
        return f"{len(found.words)} and {len(wanted.words)} {'classes' if one == 'class' else 'lines'}, {text}"
    order = ", the same names in another order" if sorted(found.words) == sorted(wanted.words) else ""
    return f"{one} {number} is {found.words[number]!r:.80} here and {wanted.words[number]!r:.80} there{order}"


@dataclass(frozen=True)
class UploadFacts:
    """The facts of one upload: one value from the client's training to the method.

    It alone knows their form in a message (a record) and on the disk (a row). A further fact is a field here with its
    line in :meth:`to_record` and :meth:`from_record`, and the place of the client's code that measures it.

    Attributes:
        client: The client's stable name; matches :data:`CLIENT_NAME`.
        architecture: The key of its model in the builders; empty while it is unknown.
        num_examples: Size of its training set; None for a pretrained model without data.
        label_counts: Training examples per class [C]; None if the client does not report them.
        pretrained: Whether the client trained nothing itself.
        ranges: Smallest and largest output of each layer that quantisation reads, on the client's own data, by layer;
            None if the client sends none.
        agreement: The names of its classes and its preprocessing, as far as the client names them.
        start: The digest of the weights that its training started from, :func:`.fingerprint.weights_sha256`; None
            if the client does not say.
    """

    client: str
    architecture: str = ""
    num_examples: int | None = None
    label_counts: tuple[int, ...] | None = None
    pretrained: bool = False
    ranges: Mapping[str, tuple[float, float]] | None = None
    agreement: Agreement = UNNAMED
    start: str | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the record ``upload`` of a client's message, without the facts that it does not report.

        The number of examples travels in the record ``metrics``, where Flower's own strategies read it.
        """
        record: dict[str, Any] = {"client": self.client}
        if self.architecture:
            record["architecture"] = self.architecture
        if self.label_counts is not None:
            record["label-counts"] = [int(count) for count in self.label_counts]
        if self.pretrained:
            record["pretrained"] = True
        if self.ranges:
            record["range-layers"] = list(self.ranges)
            record["ranges"] = [float(bound) for pair in self.ranges.values() for bound in pair]
        record |= self.agreement.to_record()
        if self.start is not None:
            record["start"] = self.start
        return record

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], num_classes: int, *, client: str, architecture: str = ""
    ) -> UploadFacts:
        """Check a client's claims about its upload, whatever they are.

        Args:
            record: Any of ``num-examples``, ``label-counts``, ``pretrained``, ``range-layers``, ``ranges``, ``start``,
                and ``classes`` and ``preprocessing`` with their digests. A pretrained model may lack the size of its
                training set.
            num_classes: C; 0 if it is not known.
            client: The client's name, already checked.
            architecture: The architecture of its model, already checked.

        Raises:
            UploadError: Names the field, its value and the remedy.
        """
        pretrained, size, counts = (record.get(key) for key in ("pretrained", "num-examples", "label-counts"))
        num_examples = None if size is None and pretrained is True else read_size(size, "num-examples")
        label_counts = None if counts is None else _read_label_counts(counts, num_classes)
        if label_counts is not None and num_examples not in (None, sum(label_counts)):
            raise refusals.sizes_differ(sum(label_counts), num_examples)
        layers, bounds = record.get("range-layers", []), record.get("ranges", [])
        ranges = None if layers == bounds == [] else read_ranges(layers, bounds, "ranges")
        start = record.get("start")
        if start is not None and not (isinstance(start, str) and SHA256.fullmatch(start)):
            raise refusals.bad_start(start)
        agreement = read_agreement(record)
        return cls(client, architecture, num_examples, label_counts, pretrained is True, ranges, agreement, start)

    def sized(self) -> UploadFacts:
        """Return these facts with the sum of the label counts as size, if the size alone is unknown.

        Raises:
            UploadError: The sum is 0.
        """
        if self.num_examples is not None or self.label_counts is None:
            return self
        return replace(self, num_examples=read_size(sum(self.label_counts), "the sum of label-counts"))

    def as_row(self) -> dict[str, Any]:
        """Return the facts as JSON writes them, by the names of the fields; without an agreement that is empty."""
        row = asdict(self)
        if self.agreement == UNNAMED:
            del row["agreement"]
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> UploadFacts:
        """Return the facts of a JSON row.

        Raises:
            AttributeError: The ranges are no mapping.
            KeyError: The row lacks the label counts or the ranges.
            TypeError: The row has another field, or a value of another kind.
            ValueError: A layer does not have two numbers.
        """
        counts, ranges = row["label_counts"], row["ranges"]
        pairs = None if ranges is None else {layer: (float(low), float(high)) for layer, (low, high) in ranges.items()}
        parts = {name: Words(said["sha256"], tuple(said["words"])) for name, said in row.get("agreement", {}).items()}
        own = {"label_counts": None if counts is None else tuple(counts), "ranges": pairs}
        return cls(**{**row, **own, "agreement": Agreement(**parts)})


def read_agreement(record: Mapping[str, Any], prefix: str = "") -> Agreement:
    """Check what another party says of what all share.

    Raises:
        UploadError: See :meth:`Words.from_record`.
    """
    return Agreement(*(Words.from_record(record, prefix + name) for name in UNNAMED.parts))


def read_size(value: object, what: str) -> int:
    """Return the size of a training set; refuse what is missing, or not a positive whole number."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value < 2**63 or value != int(value):  # type: ignore[operator, call-overload]
        raise refusals.bad_size(what, value)
    return int(value)  # type: ignore[call-overload, no-any-return]


def _read_label_counts(counts: object, num_classes: int) -> tuple[int, ...]:
    whole = tuple(c for c in counts if type(c) is int and c >= 0) if isinstance(counts, list) else ()
    wanted = num_classes or len(whole)
    if not isinstance(counts, list) or not len(whole) == len(counts) == wanted:
        raise refusals.bad_label_counts(counts, num_classes)
    return whole


def read_ranges(layers: object, bounds: object, what: str) -> dict[str, tuple[float, float]]:
    """Return the activation ranges of a model by layer, in float32, in which they are sent on.

    Args:
        bounds: A list of two finite numbers for each of them, the smallest first.

    Raises:
        UploadError: They are something else.
    """
    import numpy as np

    names = layers if isinstance(layers, list) else []
    texts = {name for name in names if isinstance(name, str) and len(name) <= MAX_LAYER_NAME}
    if not isinstance(layers, list) or not len(texts) == len(names) <= MAX_LAYERS:
        raise refusals.bad_range_layers(what, layers, MAX_LAYERS, MAX_LAYER_NAME)
    numbers = [bound for bound in bounds if type(bound) is float] if isinstance(bounds, list) else []
    if not isinstance(bounds, list) or not len(numbers) == len(bounds) == 2 * len(names):
        raise refusals.bad_ranges(what, bounds, len(names))
    with np.errstate(over="ignore"):
        pairs = np.array(numbers).astype(np.float32).reshape(-1, 2).tolist()
    for name, (low, high) in zip(names, pairs, strict=True):
        if not -np.inf < low <= high < np.inf:
            raise refusals.bad_range(what, name, low, high)
    return {name: (low, high) for name, (low, high) in zip(names, pairs, strict=True)}


@dataclass(frozen=True)
class Upload:
    """One client's accepted upload.

    Attributes:
        read: Reads the weights anew at each call (never cached), so that uploads need not be in memory together.
        open: Opens the upload as a mapping that reads each tensor when it is asked for, with what the client has
            measured for a merge; None: ``read`` reads all.
    """

    facts: UploadFacts
    read: Callable[[], State]
    open: Callable[[], Mapping[str, torch.Tensor]] | None = None

    @property
    def client(self) -> str:
        """The client's stable name."""
        return self.facts.client

    @property
    def architecture(self) -> str:
        """The key of the client's model in :attr:`Job.builders`."""
        return self.facts.architecture

    @property
    def num_examples(self) -> int | None:
        """See :attr:`UploadFacts.num_examples`."""
        return self.facts.num_examples

    @property
    def label_counts(self) -> tuple[int, ...] | None:
        """See :attr:`UploadFacts.label_counts`."""
        return self.facts.label_counts

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]] | None:
        """See :attr:`UploadFacts.ranges`."""
        return self.facts.ranges


# The kinds of uploads: a classifier, its first block, one with a class "unknown", an encoder, a decoder, or sums.
#
# The name of its architecture says it; a method works on uploads of one kind, :attr:`.method.Method.uploads`.


CLASSIFIER = "classifier"
OPEN_SET = "open-set"
PROTOTYPES = "prototypes"
BLOCK = "block"
CVAE = "cvae"
STATISTICS = "statistics"
HEAD = "head+"  # before the name of a backbone
ADAPTER = "adapter"  # the architecture of a LoRA adapter
# The second moments of sums of features: Gram matrices, sums of squares per class, or both.
GRAM, SQUARES = "gram", "squares"
# The scores that can head a table; of a log loss less is better.
HEADLINES = ("accuracy", "balanced-accuracy", "macro-f1", "auroc", "log-loss")


def in_percent(metric: str) -> bool:
    """Return whether tables show a score in per cent: a log loss is in nats, a score of the user's own as it is."""
    return metric in HEADLINES and metric != "log-loss"


# The kinds that answer an example with logits, and so have an accuracy of their own; others may follow the C logits.
PREDICTING = (CLASSIFIER, OPEN_SET, PROTOTYPES)
# The kinds whose architectures are classifiers' with a suffix.
SUFFIXES = {OPEN_SET: "+unknown", PROTOTYPES: "+prototypes", BLOCK: "+block"}
# What a model raises on examples that it does not take.
MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def kind_of(architecture: str) -> str:
    """Return the kind of an architecture: ``net+unknown``, ``cvae-decoder``, sums of features, or any classifier.

    Sums are ``statistics``, of the run's backbone, or ``statistics+<backbone>``.
    """
    for kind, suffix in SUFFIXES.items():
        if architecture.endswith(suffix):
            return kind
    if architecture.partition("+")[0] == STATISTICS:
        return STATISTICS
    return CVAE if architecture == "cvae-decoder" else CLASSIFIER


def is_head(architecture: str) -> bool:
    """Say whether an architecture is a head on a frozen backbone, ``head+<backbone>``: its images get no gradient."""
    return architecture.startswith(HEAD)


def backbone_in(architecture: str) -> str:
    """Return the backbone that the name of a head or of sums has; empty for that of the run."""
    return architecture.partition("+")[2] if is_head(architecture) or kind_of(architecture) == STATISTICS else ""


def base_of(architecture: str) -> str:
    """Return an architecture's name without the suffix of its kind: that of the classifier that it was made of."""
    return architecture.removesuffix(SUFFIXES.get(kind_of(architecture), ""))


# What a client measures for a merge of weights travels beside them under these prefixes: mean squares of gradients by
# parameter, and Gram matrices of a linear layer's inputs by layer, whose weight is [out, in], or [in, out].
FISHER_OF, GRAM_OF, GRAM_OF_ROWS = "fisher:", "gram:", "gram-of-rows:"
MEASURED = (FISHER_OF, GRAM_OF, GRAM_OF_ROWS)


def name_in(layer: str, part: str) -> str:
    """Return the name of a layer's tensor in a state_dict; the model itself is the layer without a name."""
    return f"{layer}.{part}" if layer else part


def weights_alone(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return an upload's weights, without what its client measured for a merge."""
    return {name: value for name, value in arrays.items() if not name.startswith(MEASURED)}


# Stands for examples that nobody described, where a method merges weights alone; the number of classes is then 0.
UNKNOWN_SHAPE = (1, 1, 1)


def holds_images(input_shape: tuple[int, int, int]) -> bool:
    """Say whether examples of this shape are images; rows of features are (F, 1, 1), texts of L tokens (1, 1, L)."""
    return input_shape[1] > 1


def default_normalization(input_shape: tuple[int, int, int]) -> Normalization:
    """Return the input space where none is given: images from -1 to 1, rows and texts as they are stored."""
    channels = input_shape[0]
    return Normalization.half(channels) if holds_images(input_shape) else Normalization.identity(channels)


def choose_normalization(given: object, input_shape: tuple[int, int, int]) -> Normalization:
    """Return the input space of models, given the user's.

    Args:
        given: A mean and a standard deviation, each a number for all channels or one number per channel; None for
            :func:`default_normalization`.
        input_shape: (channels, height, width) of one image.

    Raises:
        OptionError: It is something else.
    """
    if given is None:
        return default_normalization(input_shape)
    channels, pair = input_shape[0], tuple(given) if isinstance(given, tuple | list) else ()
    sides = [(float(side),) * channels if isinstance(side, int | float) else tuple(side) for side in pair
             if isinstance(side, int | float | tuple | list)]  # fmt: skip
    numbers = all(isinstance(value, int | float) for side in sides for value in side)
    if len(sides) != 2 or {len(side) for side in sides} != {channels} or not numbers or min(sides[1]) <= 0:
        raise OptionError(
            f"normalization is {given!r}: must be one mean and one std per channel, {channels}, or one number for all, "
            "and std above 0"
        )
    return Normalization(*(tuple(map(float, side)) for side in sides))


def run_on_blanks(model: Callable[..., Any], input_shape: tuple[int, int, int]) -> Any:
    """Return what a model makes of two blank examples; texts that it refuses as floats are whole numbers.

    Raises:
        MODEL_ERRORS: It takes neither.
    """
    import torch

    blank = torch.zeros(2, *input_shape)
    try:
        return model(blank)
    except MODEL_ERRORS as error:
        if tuple(input_shape[:2]) != (1, 1):
            raise
        try:
            return model(blank.long())
        except MODEL_ERRORS as again:
            raise TypeError(f"{error}; as whole numbers: {again}") from again


# The mean and the deviation of known data sets' pixels, which their papers and codes have published.

Numbers = tuple[float, ...]

# Data set -> mean and standard deviation of its training pixels in [0, 1], per channel, at their own size.
PIXELS: Mapping[str, tuple[Numbers, Numbers]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def part_of(state: Mapping[str, torch.Tensor], prefix: str) -> State:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}

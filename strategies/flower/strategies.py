"""The public strategies: one class per method, a OneShot with that method.

All take the arguments of :class:`strategies.flower.one_shot.OneShot` after its method::

    strategy = Dense(Net, num_classes=10, input_shape=(3, 32, 32))
    result = strategy.start(grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": 0.1}))
    model = strategy.outcome
"""

from __future__ import annotations

from functools import partialmethod

from ..method import METHODS
from .one_shot import OneShot


class OneShotFedAvg(OneShot):
    """One-shot FedAvg: the average of the uploads. Refuses clients of different architectures."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fedavg"])


class TaskArithmetic(OneShot):
    """Task arithmetic: the clients' mean update, scaled; any model, without classes or shapes."""

    __init__ = partialmethod(OneShot.__init__, METHODS["task-arithmetic"])


class TIES(OneShot):
    """TIES: large changes whose signs agree; any model, without classes or shapes."""

    __init__ = partialmethod(OneShot.__init__, METHODS["ties"])


class DARE(OneShot):
    """DARE: changes dropped at random and rescaled, then merged; any model, without classes or shapes."""

    __init__ = partialmethod(OneShot.__init__, METHODS["dare"])


class TSV(OneShot):
    """TSV-Merge: singular directions of the clients' changes, decorrelated; any model, without classes or shapes."""

    __init__ = partialmethod(OneShot.__init__, METHODS["tsv"])


class FisherMerging(OneShot):
    """Fisher merging: weights averaged by the clients' squared gradients, which they send beside their weights."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fisher"])


class RegMean(OneShot):
    """RegMean: linear layers merged by the Gram matrices of their inputs, which clients send beside their weights."""

    __init__ = partialmethod(OneShot.__init__, METHODS["regmean"])


class FedENS(OneShot):
    """The ensemble of the uploads by their mean logits."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fedens"])


class DWFedENS(OneShot):
    """The ensemble of the uploads, logits weighted by the clients' numbers of examples."""

    __init__ = partialmethod(OneShot.__init__, METHODS["dw-fedens"])


class LabelCountEnsemble(OneShot):
    """The ensemble of the uploads, each class's logits weighted by the clients' counts of that class."""

    __init__ = partialmethod(OneShot.__init__, METHODS["label-count-ensemble"])


class Fens(OneShot):
    """FENS: the ensemble of the uploads, its aggregator trained by the clients in many small rounds."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fens"])


class FedDF(OneShot):
    """FedDF: the ensemble distilled on real images of the server without labels (``proxy=``)."""

    __init__ = partialmethod(OneShot.__init__, METHODS["feddf"])


class FedKD(OneShot):
    """FedKD: the label-count ensemble distilled on real, unlabelled images of the server, logit by logit."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fedkd"])


class FedET(OneShot):
    """Fed-ET: a student of the uploads' consensus and dissent on real, unlabelled images of the server."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fed-et"])


class Distilled(OneShot):
    """One model distilled from the ensemble, or from another teacher, on images of the server (``proxy=``)."""

    __init__ = partialmethod(OneShot.__init__, METHODS["distill"])


class FDAFL(OneShot):
    """F-DAFL: data-free learning from the ensemble with a generator."""

    __init__ = partialmethod(OneShot.__init__, METHODS["f-dafl"])


class FADI(OneShot):
    """F-ADI: adaptive inversion of the ensemble, without a generator."""

    __init__ = partialmethod(OneShot.__init__, METHODS["f-adi"])


class CoBoosting(OneShot):
    """Co-Boosting: the synthetic images and the weights of the ensemble make each other better, epoch by epoch."""

    __init__ = partialmethod(OneShot.__init__, METHODS["co-boosting"])


class Dense(OneShot):
    """DENSE (FedSyn): a generator trained against the ensemble, a student distilled on its images."""

    __init__ = partialmethod(OneShot.__init__, METHODS["dense"])


class IntactOFL(OneShot):
    """IntactOFL: the uploads stay as they are, as experts under a gate that learns from synthetic images."""

    __init__ = partialmethod(OneShot.__init__, METHODS["intactofl"])


class Tally(OneShot):
    """Tally: counts of classes weigh the uploads class by class; that ensemble is distilled on noise."""

    __init__ = partialmethod(OneShot.__init__, METHODS["tally"])


class FedOV(OneShot):
    """FedOV: the vote of open-set classifiers; for each sample, those count that find it the least unknown."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fedov"])


class FAFI(OneShot):
    """FAFI: encoders with prototypes; the server sums the features and averages the prototypes."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fafi"])


class RidgeOnFeatures(OneShot):
    """Ridge regression on a frozen backbone's features; clients upload ``statistics``."""

    __init__ = partialmethod(OneShot.__init__, METHODS["ridge"])


class LdaOnFeatures(OneShot):
    """Linear discriminants on a frozen backbone's features; clients upload ``statistics``."""

    __init__ = partialmethod(OneShot.__init__, METHODS["lda"])


class FedPFT(OneShot):
    """FedPFT: a head trained on draws of the clients' Gaussians of features; clients upload ``statistics``."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fedpft"])


class FedCvaeEns(OneShot):
    """FedCVAE-Ens: a student of images that the clients' decoders make; clients upload ``cvae-decoder``."""

    __init__ = partialmethod(OneShot.__init__, METHODS["fedcvae-ens"])

"""One-shot federated learning on Flower: clients upload a trained model once, the server does the rest.

Names are resolved at their first use: a client that imports ``strategies.client`` loads neither torch nor Ray, and a
replay loads no Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .co_boosting import CoBoostingConfig
    from .combiners.outcomes import load_model
    from .compute import InProcess, RayActors, ServerCompute
    from .dense import DenseConfig
    from .f_adi import FAdiConfig
    from .f_dafl import FDaflConfig
    from .fed_et import FedEtConfig
    from .fed_gen import FedGenConfig
    from .fedavg import FedAvgConfig
    from .fedcvae_ens import FedCvaeEnsConfig
    from .feddf import FedDfConfig
    from .fedhydra import FedHydraConfig
    from .fedkd import FedKdConfig
    from .fedov import FedOvConfig
    from .fens import FensConfig
    from .flboost import FlBoostConfig
    from .flower.one_shot import OneShot
    from .flower.rounds.flboost import FLBoost
    from .flower.rounds.iterative import Iterative
    from .flower.run import RunOptions
    from .flower.strategies import (
        FADI,
        FDAFL,
        CoBoosting,
        Dense,
        DWFedENS,
        FedCvaeEns,
        FedDF,
        FedENS,
        FedET,
        FedHydra,
        FedKD,
        FedOV,
        Fens,
        IntactOFL,
        LabelCountEnsemble,
        LdaOnFeatures,
        OneShotFedAvg,
        RidgeOnFeatures,
        Tally,
    )
    from .gatekeeper.config import GatekeeperConfig
    from .intactofl import IntactOflConfig
    from .lda import LdaConfig
    from .method import METHODS, Job, Method, Normalization, Outcome
    from .ridge import RidgeConfig
    from .rounds.config import IterativeConfig
    from .rounds.refinement import Refiner
    from .run.ensembles import load_ensemble_module
    from .tally import TallyConfig

_HOMES = {
    "CoBoosting": "flower.strategies",
    "CoBoostingConfig": "co_boosting",
    "DWFedENS": "flower.strategies",
    "Dense": "flower.strategies",
    "DenseConfig": "dense",
    "FADI": "flower.strategies",
    "FAdiConfig": "f_adi",
    "FDAFL": "flower.strategies",
    "FDaflConfig": "f_dafl",
    "FedAvgConfig": "fedavg",
    "FedCvaeEns": "flower.strategies",
    "LdaConfig": "lda",
    "LdaOnFeatures": "flower.strategies",
    "RidgeConfig": "ridge",
    "RidgeOnFeatures": "flower.strategies",
    "FedCvaeEnsConfig": "fedcvae_ens",
    "FedDF": "flower.strategies",
    "FedDfConfig": "feddf",
    "FedENS": "flower.strategies",
    "Fens": "flower.strategies",
    "FensConfig": "fens",
    "FedET": "flower.strategies",
    "FedEtConfig": "fed_et",
    "FedGenConfig": "fed_gen",
    "FedHydra": "flower.strategies",
    "FedHydraConfig": "fedhydra",
    "FedKD": "flower.strategies",
    "FedKdConfig": "fedkd",
    "FedOV": "flower.strategies",
    "FedOvConfig": "fedov",
    "FLBoost": "flower.rounds.flboost",
    "FlBoostConfig": "flboost",
    "GatekeeperConfig": "gatekeeper.config",
    "InProcess": "compute",
    "IntactOFL": "flower.strategies",
    "IntactOflConfig": "intactofl",
    "Iterative": "flower.rounds.iterative",
    "IterativeConfig": "rounds.config",
    "Job": "method",
    "LabelCountEnsemble": "flower.strategies",
    "METHODS": "method",
    "Method": "method",
    "Normalization": "method",
    "OneShot": "flower.one_shot",
    "OneShotFedAvg": "flower.strategies",
    "Outcome": "method",
    "RayActors": "compute",
    "Refiner": "rounds.refinement",
    "RunOptions": "flower.run",
    "ServerCompute": "compute",
    "Tally": "flower.strategies",
    "TallyConfig": "tally",
    "load_ensemble_module": "run.ensembles",
    "load_model": "combiners.outcomes",
}

__all__ = [
    "FADI",
    "FDAFL",
    "METHODS",
    "CoBoosting",
    "CoBoostingConfig",
    "DWFedENS",
    "Dense",
    "DenseConfig",
    "FAdiConfig",
    "FDaflConfig",
    "FLBoost",
    "FedAvgConfig",
    "FedCvaeEns",
    "FedCvaeEnsConfig",
    "FedDF",
    "FedDfConfig",
    "FedENS",
    "FedET",
    "FedEtConfig",
    "FedGenConfig",
    "FedHydra",
    "FedHydraConfig",
    "FedKD",
    "FedKdConfig",
    "FedOV",
    "FedOvConfig",
    "Fens",
    "FensConfig",
    "FlBoostConfig",
    "GatekeeperConfig",
    "InProcess",
    "IntactOFL",
    "IntactOflConfig",
    "Iterative",
    "IterativeConfig",
    "Job",
    "LabelCountEnsemble",
    "LdaConfig",
    "LdaOnFeatures",
    "Method",
    "Normalization",
    "OneShot",
    "OneShotFedAvg",
    "Outcome",
    "RayActors",
    "Refiner",
    "RidgeConfig",
    "RidgeOnFeatures",
    "RunOptions",
    "ServerCompute",
    "Tally",
    "TallyConfig",
    "load_ensemble_module",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)

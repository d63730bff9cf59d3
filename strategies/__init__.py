"""One-shot federated learning on Flower: clients upload a trained model once, the server does the rest.

Each public name is imported when it is first used: a client that imports ``strategies.client`` loads neither torch nor
Ray, and a replay loads no Flower.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .combiners.outcomes import load_model as load_model
    from .compute import InProcess as InProcess
    from .compute import RayActors as RayActors
    from .compute import ServerCompute as ServerCompute
    from .core.stage_options import GatekeeperConfig as GatekeeperConfig
    from .flower.local_grid import simulate as simulate
    from .flower.one_shot import OneShot as OneShot
    from .flower.rounds.flboost import FLBoost as FLBoost
    from .flower.rounds.iterative import Iterative as Iterative
    from .flower.run import RunOptions as RunOptions
    from .flower.strategies import FADI as FADI
    from .flower.strategies import FAFI as FAFI
    from .flower.strategies import FDAFL as FDAFL
    from .flower.strategies import CoBoosting as CoBoosting
    from .flower.strategies import Dense as Dense
    from .flower.strategies import Distilled as Distilled
    from .flower.strategies import DWFedENS as DWFedENS
    from .flower.strategies import FedCvaeEns as FedCvaeEns
    from .flower.strategies import FedDF as FedDF
    from .flower.strategies import FedENS as FedENS
    from .flower.strategies import FedET as FedET
    from .flower.strategies import FedKD as FedKD
    from .flower.strategies import FedOV as FedOV
    from .flower.strategies import FedPFT as FedPFT
    from .flower.strategies import Fens as Fens
    from .flower.strategies import IntactOFL as IntactOFL
    from .flower.strategies import LabelCountEnsemble as LabelCountEnsemble
    from .flower.strategies import LdaOnFeatures as LdaOnFeatures
    from .flower.strategies import OneShotFedAvg as OneShotFedAvg
    from .flower.strategies import RidgeOnFeatures as RidgeOnFeatures
    from .flower.strategies import Tally as Tally
    from .merging.merge import Result as Result
    from .merging.merge import merge as merge
    from .method import METHODS as METHODS
    from .method import Job as Job
    from .method import Method as Method
    from .method import Normalization as Normalization
    from .method import Outcome as Outcome
    from .methods.co_boosting import CoBoostingConfig as CoBoostingConfig
    from .methods.dense import DenseConfig as DenseConfig
    from .methods.distill import DistillConfig as DistillConfig
    from .methods.f_adi import FAdiConfig as FAdiConfig
    from .methods.f_dafl import FDaflConfig as FDaflConfig
    from .methods.fafi import FafiConfig as FafiConfig
    from .methods.fed_et import FedEtConfig as FedEtConfig
    from .methods.fed_gen import FedGenConfig as FedGenConfig
    from .methods.fedavg import FedAvgConfig as FedAvgConfig
    from .methods.fedcvae_ens import FedCvaeEnsConfig as FedCvaeEnsConfig
    from .methods.feddf import FedDfConfig as FedDfConfig
    from .methods.fedkd import FedKdConfig as FedKdConfig
    from .methods.fedov import FedOvConfig as FedOvConfig
    from .methods.fedpft import FedPftConfig as FedPftConfig
    from .methods.fens import FensConfig as FensConfig
    from .methods.flboost import FlBoostConfig as FlBoostConfig
    from .methods.intactofl import IntactOflConfig as IntactOflConfig
    from .methods.lda import LdaConfig as LdaConfig
    from .methods.ridge import RidgeConfig as RidgeConfig
    from .methods.tally import TallyConfig as TallyConfig
    from .rounds.config import IterativeConfig as IterativeConfig
    from .rounds.refinement import Refiner as Refiner
    from .run.ensembles import load_ensemble_module as load_ensemble_module
    from .run.results import results as results


# Public name -> its module; the imports above say the same to type checkers, and a test compares.
_HOMES = {
    "load_model": ".combiners.outcomes",
    "InProcess": ".compute",
    "RayActors": ".compute",
    "ServerCompute": ".compute",
    "simulate": ".flower.local_grid",
    "OneShot": ".flower.one_shot",
    "FLBoost": ".flower.rounds.flboost",
    "Iterative": ".flower.rounds.iterative",
    "RunOptions": ".flower.run",
    "FADI": ".flower.strategies",
    "FAFI": ".flower.strategies",
    "FDAFL": ".flower.strategies",
    "CoBoosting": ".flower.strategies",
    "Dense": ".flower.strategies",
    "Distilled": ".flower.strategies",
    "DWFedENS": ".flower.strategies",
    "FedCvaeEns": ".flower.strategies",
    "FedDF": ".flower.strategies",
    "FedENS": ".flower.strategies",
    "FedET": ".flower.strategies",
    "FedKD": ".flower.strategies",
    "FedOV": ".flower.strategies",
    "FedPFT": ".flower.strategies",
    "Fens": ".flower.strategies",
    "IntactOFL": ".flower.strategies",
    "LabelCountEnsemble": ".flower.strategies",
    "LdaOnFeatures": ".flower.strategies",
    "OneShotFedAvg": ".flower.strategies",
    "RidgeOnFeatures": ".flower.strategies",
    "Tally": ".flower.strategies",
    "GatekeeperConfig": ".core.stage_options",
    "Result": ".merging.merge",
    "merge": ".merging.merge",
    "METHODS": ".method",
    "Job": ".method",
    "Method": ".method",
    "Normalization": ".method",
    "Outcome": ".method",
    "CoBoostingConfig": ".methods.co_boosting",
    "DenseConfig": ".methods.dense",
    "DistillConfig": ".methods.distill",
    "FAdiConfig": ".methods.f_adi",
    "FDaflConfig": ".methods.f_dafl",
    "FafiConfig": ".methods.fafi",
    "FedEtConfig": ".methods.fed_et",
    "FedGenConfig": ".methods.fed_gen",
    "FedAvgConfig": ".methods.fedavg",
    "FedCvaeEnsConfig": ".methods.fedcvae_ens",
    "FedDfConfig": ".methods.feddf",
    "FedKdConfig": ".methods.fedkd",
    "FedOvConfig": ".methods.fedov",
    "FedPftConfig": ".methods.fedpft",
    "FensConfig": ".methods.fens",
    "FlBoostConfig": ".methods.flboost",
    "IntactOflConfig": ".methods.intactofl",
    "LdaConfig": ".methods.lda",
    "RidgeConfig": ".methods.ridge",
    "TallyConfig": ".methods.tally",
    "IterativeConfig": ".rounds.config",
    "Refiner": ".rounds.refinement",
    "load_ensemble_module": ".run.ensembles",
    "results": ".run.results",
}


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)

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
    from .flower.lora_merge import LoRAMerge as LoRAMerge
    from .flower.one_shot import OneShot as OneShot
    from .flower.rounds.config import IterativeConfig as IterativeConfig
    from .flower.rounds.flboost import FLBoost as FLBoost
    from .flower.rounds.iterative import Iterative as Iterative
    from .flower.rounds.refinement import Refiner as Refiner
    from .flower.run import RunOptions as RunOptions
    from .flower.strategies import DARE as DARE
    from .flower.strategies import FADI as FADI
    from .flower.strategies import FAFI as FAFI
    from .flower.strategies import FDAFL as FDAFL
    from .flower.strategies import TIES as TIES
    from .flower.strategies import TSV as TSV
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
    from .flower.strategies import FisherMerging as FisherMerging
    from .flower.strategies import IntactOFL as IntactOFL
    from .flower.strategies import LabelCountEnsemble as LabelCountEnsemble
    from .flower.strategies import LdaOnFeatures as LdaOnFeatures
    from .flower.strategies import OneShotFedAvg as OneShotFedAvg
    from .flower.strategies import RegMean as RegMean
    from .flower.strategies import RidgeOnFeatures as RidgeOnFeatures
    from .flower.strategies import Tally as Tally
    from .flower.strategies import TaskArithmetic as TaskArithmetic
    from .merging.merge import Result as Result
    from .merging.merge import merge as merge
    from .merging.shared_base import SharedBase as SharedBase
    from .method import METHODS as METHODS
    from .method import Job as Job
    from .method import Method as Method
    from .method import Normalization as Normalization
    from .method import Outcome as Outcome
    from .methods.co_boosting import CoBoostingConfig as CoBoostingConfig
    from .methods.dare import DareConfig as DareConfig
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
    from .methods.fisher import FisherConfig as FisherConfig
    from .methods.flboost import FlBoostConfig as FlBoostConfig
    from .methods.intactofl import IntactOflConfig as IntactOflConfig
    from .methods.lda import LdaConfig as LdaConfig
    from .methods.regmean import RegMeanConfig as RegMeanConfig
    from .methods.ridge import RegressionSums as RegressionSums
    from .methods.ridge import RidgeConfig as RidgeConfig
    from .methods.ridge import ridge_regression as ridge_regression
    from .methods.tally import TallyConfig as TallyConfig
    from .methods.task_arithmetic import TaskArithmeticConfig as TaskArithmeticConfig
    from .methods.ties import TiesConfig as TiesConfig
    from .methods.tsv import TsvConfig as TsvConfig
    from .run.ensembles import load_ensemble_module as load_ensemble_module
    from .run.results import results as results


# Module -> its public names; the imports above say the same to type checkers, and a test compares.
_NAMES = {
    ".combiners.outcomes": "load_model",
    ".compute": "InProcess RayActors ServerCompute",
    ".flower.local_grid": "simulate",
    ".flower.lora_merge": "LoRAMerge",
    ".flower.one_shot": "OneShot",
    ".flower.rounds.flboost": "FLBoost",
    ".flower.rounds.iterative": "Iterative",
    ".flower.run": "RunOptions",
    ".flower.strategies": "DARE FADI FAFI FDAFL TIES TSV CoBoosting Dense Distilled DWFedENS FedCvaeEns FedDF FedENS "
    "FedET FedKD FedOV FedPFT Fens FisherMerging IntactOFL LabelCountEnsemble LdaOnFeatures OneShotFedAvg RegMean "
    "RidgeOnFeatures Tally TaskArithmetic",
    ".core.stage_options": "GatekeeperConfig",
    ".merging.merge": "Result merge",
    ".merging.shared_base": "SharedBase",
    ".method": "METHODS Job Method Normalization Outcome",
    ".methods.co_boosting": "CoBoostingConfig",
    ".methods.dare": "DareConfig",
    ".methods.dense": "DenseConfig",
    ".methods.distill": "DistillConfig",
    ".methods.f_adi": "FAdiConfig",
    ".methods.f_dafl": "FDaflConfig",
    ".methods.fafi": "FafiConfig",
    ".methods.fed_et": "FedEtConfig",
    ".methods.fed_gen": "FedGenConfig",
    ".methods.fedavg": "FedAvgConfig",
    ".methods.fedcvae_ens": "FedCvaeEnsConfig",
    ".methods.feddf": "FedDfConfig",
    ".methods.fedkd": "FedKdConfig",
    ".methods.fedov": "FedOvConfig",
    ".methods.fedpft": "FedPftConfig",
    ".methods.fens": "FensConfig",
    ".methods.fisher": "FisherConfig",
    ".methods.flboost": "FlBoostConfig",
    ".methods.intactofl": "IntactOflConfig",
    ".methods.lda": "LdaConfig",
    ".methods.regmean": "RegMeanConfig",
    ".methods.ridge": "RegressionSums RidgeConfig ridge_regression",
    ".methods.tally": "TallyConfig",
    ".methods.task_arithmetic": "TaskArithmeticConfig",
    ".methods.ties": "TiesConfig",
    ".methods.tsv": "TsvConfig",
    ".flower.rounds.config": "IterativeConfig",
    ".flower.rounds.refinement": "Refiner",
    ".run.ensembles": "load_ensemble_module",
    ".run.results": "results",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)

"""One-shot federated learning on Flower: clients upload a trained model once, the server does the rest.

The imports below are the list of public names, which type checkers read. At run time each is imported when it is first
used: a client that imports ``strategies.client`` loads neither torch nor Ray, and a replay loads no Flower.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .combiners.outcomes import load_model as load_model
    from .compute import InProcess as InProcess
    from .compute import RayActors as RayActors
    from .compute import ServerCompute as ServerCompute
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
    from .gatekeeper.config import GatekeeperConfig as GatekeeperConfig
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


def _homes() -> dict[str, str]:
    """Return public name -> its module, as this file's own imports have it."""
    imports = [
        node for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    return {name.name: f".{node.module}" for node in imports if node.level for name in node.names}


_HOMES = _homes()


def __dir__() -> list[str]:
    return sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)

"""graphfsdp: train with the whole iteration in one CUDA graph."""

from graphfsdp._capture.phase import Phase as Phase
from graphfsdp._capture.report import CaptureReport as CaptureReport
from graphfsdp._capture.step import CapturedStep as CapturedStep
from graphfsdp.config import MixedPrecisionPolicy as MixedPrecisionPolicy
from graphfsdp.config import Scope as Scope
from graphfsdp.errors import BatchMismatchError as BatchMismatchError
from graphfsdp.errors import CaptureError as CaptureError
from graphfsdp.errors import ConfigError as ConfigError
from graphfsdp.errors import GraphFSDPError as GraphFSDPError
from graphfsdp.errors import GuardError as GuardError
from graphfsdp.errors import InvalidLossError as InvalidLossError
from graphfsdp.errors import PhaseError as PhaseError
from graphfsdp.errors import PrecisionError as PrecisionError
from graphfsdp.front import capture as capture

__version__ = "0.1.0"

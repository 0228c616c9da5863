"""The classes that task YAMLs name: `class: !function harness_ext.tasks.NaturalTask`.

Importing this package registers our metrics with lm_eval and gives its models the request type that our tasks use.
"""

from harness_ext.engine.attach import attach
from harness_ext.tasks.corpus import FlatnessTask, LossTask
from harness_ext.tasks.metrics import register_metrics
from harness_ext.tasks.natural import NaturalTask
from harness_ext.tasks.probe import (
    ClassWordsProbe,
    ConditionalMeanProbe,
    ProbabilitiesProbe,
    ProbeTask,
    QuadProbe,
    RandomProjectionProbe,
    SubsetWordsProbe,
)

__all__ = [
    "ClassWordsProbe",
    "ConditionalMeanProbe",
    "FlatnessTask",
    "LossTask",
    "NaturalTask",
    "ProbabilitiesProbe",
    "ProbeTask",
    "QuadProbe",
    "RandomProjectionProbe",
    "SubsetWordsProbe",
]

attach()
register_metrics()

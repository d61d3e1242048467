"""Say what a finding of the lint is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal[
    "type",  # int8 only, scales in FP32 or FP16 (case C16)
    "zero point",  # absent or all 0 (case C16)
    "scale",  # a constant; finite, positive, a normal FP16 number (case C17)
    "dead channel",  # all codes 0: scale 1 (case C17)
    "codes",  # -127 to 127 (case C16)
    "axis",  # weights: one scale per output channel
    "per tensor",  # activations: one scale
    "pair",  # one Quantize feeds one Dequantize with the same scale, and a weight is stored as codes
    "shared",  # one pair per tensor, whoever takes it
    "operands",  # a product has both operands dequantised, or none
    "consumer",  # nothing but such products takes a dequantised value
    "cast",  # no Cast between Dequantize and product; all of one type
    "bias",  # a float addition
    "output",  # outputs of the graph are not quantised
    "operator",  # no other kind of quantisation, and none inside If, Loop or Scan
    "multiple of 16",  # sizes that fill the INT8 kernels; a warning
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One finding."""

    rule: Rule
    node: str
    tensor: str
    found: str  # what is there, with its value
    expected: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.rule}: node {self.node}, tensor {self.tensor}: {self.found}; expected {self.expected}"

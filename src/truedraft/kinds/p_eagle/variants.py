"""The variants of P-EAGLE heads that the doctor tries: those of EAGLE-3."""

from truedraft.kinds.eagle.variants import VARIANTS
from truedraft.kinds.p_eagle.drafter import PEagle
from truedraft.kinds.p_eagle.module import PEagleHead
from truedraft.measure.variants import Examined

EXAMINED = Examined("a P-EAGLE head", PEagle, VARIANTS, PEagleHead)

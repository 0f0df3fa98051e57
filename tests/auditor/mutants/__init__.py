"""Wrong decoders: each is the real engine with its production drafter and one real defect."""

from auditor.mutants import drafts, narrow, processors, rules, states
from auditor.mutants.mutant import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "drafts", "narrow", "processors", "rules", "states"]

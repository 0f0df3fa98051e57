"""Is a decoder exact? Proofs by enumeration here; nothing in this folder knows the engine."""

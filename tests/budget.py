"""Choose the cases that the default run has time for: each claim is proven once there, and in full by test-all."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def budgeted(cases: Sequence[Any], always: Collection[Any], ids: Sequence[str] | None = None) -> list[Any]:
    """Return all cases for a parametrisation; those that `always` does not name, by id or by value, are slow."""
    names = [str(case) for case in cases] if ids is None else list(ids)
    missing = {str(name) for name in always} - set(names)
    if missing:
        raise ValueError(f"no case is called {', '.join(sorted(missing))}; there are {', '.join(names)}")
    kept = {str(name) for name in always}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=[] if name in kept else [pytest.mark.slow]
        )
        for case, name in zip(cases, names, strict=True)
    ]


EVERY: dict[str, int] = {
    "test_coupled_is_plain_seeded_decoding_token_for_token": 3,
    "test_a_wrong_decoder_is_found": 2,
    "test_a_right_decoder_in_the_same_world_is_not_called_biased": 2,
    "test_greedy_text_is_transformers_greedy_text": 3,
    "test_a_request_is_the_same_alone_and_among_63_others": 3,
    "test_the_others_may_sample_differently": 2,
    "test_preempted_rows_go_on_as_if_nothing_had_happened": 2,
    "test_preempted_while_its_prompt_is_read": 2,
    "test_captured_passes_give_the_texts_of_launched_ones": 2,
    "test_chain_drafts_give_the_distribution_of_the_target": 3,
    "test_tree_drafts_give_the_distribution_of_the_target": 3,
    "test_near_and_far_drafters": 2,
    "test_a_batch_gives_the_reference_verdict": 2,
    "test_a_request_that_runs_out_of_trials_gives_the_reference_verdict": 2,
    "test_any_draft_length": 2,
    "test_token_and_distribution_are_the_reference_s": 2,
    "test_deep_nuclei_are_cut_by_all_programs_together": 3,
    "test_cutoff_and_mass_are_the_references": 2,
    "test_ties_at_the_cutoff_are_kept": 2,
    "test_a_fault_is_named_by_the_reference": 2,
    "test_with_filters_all_slices_are_read_where_p_is_positive": 2,
    "test_the_round_of_a_tree_waits_for_nothing_but_its_copy": 2,
    "test_the_loop_rejects_a_wrong_verifier": 2,
    "test_greedy_text_with_a_head_is_transformers_greedy_text": 2,
    "test_json_keeps_to_its_schema_under_every_rule": 2,
    "test_the_kernels_decide_as_the_rules_do": 2,
    "test_texts_are_the_same_with_and_without_reuse": 2,
    "test_a_greedy_tree_leaves_out_paths_below_the_confidence": 2,
    "test_bets_on_a_heads_own_distribution_decide": 2,
    "test_nothing_is_wider_than_the_screen": 2,
    "test_greedy_texts_of_a_ragged_batch_of_four_are_transformers_own": 2,
    "test_a_row_does_not_depend_on_its_neighbours": 2,
    "test_every_processor_is_called_as_in_plain_generate": 2,
    "test_the_reported_deviation_agrees_with_sampling": 2,
    "test_a_perfect_head_is_always_accepted": 2,
    "test_a_perfect_drafter_is_always_accepted": 2,
}
"""Tests with many cases, of which the default run takes every n-th."""


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of `EVERY` that the default run leaves out as slow."""
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name not in EVERY or item.get_closest_marker("slow"):
            continue
        key = (str(item.path), name)
        if seen.setdefault(key, 0) % EVERY[name]:
            item.add_marker(pytest.mark.slow)
        seen[key] += 1

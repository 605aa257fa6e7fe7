# SPDX-License-Identifier: Apache-2.0
"""Simulation: the real flow in virtual time, with work that takes as long as a profile says.

profile        the costs of a workload: responses, decoding, stages, weight updates, failures
distribution   constants, lognormals and histograms of a profile
draws          the responses to each prompt, drawn from a seed, independent of the layout
replica        one engine that decodes many responses at the same time
least_busy     replicas ordered by open requests
replica_pool   all engines of a run
trainer        a `PipelineTrainer` made of these
simulation     one run of `AsyncTrainingFlow` with it
bound          the best step time that any schedule could reach
layout         placements, batches and settings to simulate
candidates     the layouts, strategies and lags to consider, with estimates and bounds
search         which of them to choose
explanation    the choice in words: lag, memory, pools
run_log        the log of a real run
extraction     a profile extracted from it
against        a real run compared with its prediction
"""

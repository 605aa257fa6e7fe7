# SPDX-License-Identifier: Apache-2.0
"""RL of flow matching models: an SDE step of the sampler is what a token is for a language model.

    schedule ──► sde ─────────┐
                              ├──► the log-prob of each SDE step, for the sampler and for the trainer
    seeds ─────► windows ─────┘

    schedule     noise levels of a sampler, from 1 to 0
    sde          the Gaussian of one step, its log-prob, and the divergence of two policies
    windows      which steps of a prompt group are stochastic, and so trained
    guard        the ratio of GRPO-Guard, sample by sample
    seeds        a random stream for each sample

Pure torch: nothing here imports verl, Ray or an engine.
"""

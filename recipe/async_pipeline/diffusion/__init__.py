# SPDX-License-Identifier: Apache-2.0
"""RL of flow matching models: an SDE step of the sampler is what a token is for a language model.

    schedule ──► sde ─────────┐
                              ├──► evaluate: the log-prob of each SDE step, for the trainer
                 windows ─────┤
                              └──► step_engine: samples, and the log-prob of each SDE step
    families ──► velocity ────┘

    schedule     noise levels of a sampler, from 1 to 0
    sde          the Gaussian of one step, and its log-prob; log-probs of recorded steps
    windows      which steps of a prompt group are stochastic, and so trained; random streams
    families     Stable Diffusion 3 and FLUX: how their transformers are called
    step_engine  draws samples; requests join and weights change between two denoising steps
    model_folder its files; text encoders and VAE: from prompts to conditions, from latents to pictures
    transformer_adapter  loads versions of a transformer's weights, or of its LoRA adapter, to be proved

Nothing here imports verl, Ray or an engine, and what needs diffusers imports it when it is called.
"""

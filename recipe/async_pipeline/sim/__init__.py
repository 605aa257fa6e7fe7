# SPDX-License-Identifier: Apache-2.0
"""What a run would be like: the real flow in virtual time, with executors that cost what a profile says.

profile       what a workload costs: answers, decoding, stages, weights, failures
draws         the answers of each prompt, from a seed; the same whatever the layout
replicas      engines that decode many answers at once, and their loads
trainer       a `PipelineTrainer` made of these
simulation    a run of `AsyncTrainingFlow` with it
bound         what no schedule could beat
search        which layout, strategy and lag to choose
"""

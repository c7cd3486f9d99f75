"""The maths of RLHF: tensors and floats in, tensors out; torch is the only import.

Shapes are `B` sequences, `T` response tokens (right-padded) and `V` vocabulary. A mask is boolean, True on
response tokens with the end of sequence included; what stands outside it, NaN included, changes neither value
nor gradient.

    advantages         GAE, Monte-Carlo returns, length-adaptive λ, whitening
    kl                 estimates of KL(π‖ref) from sampled tokens
    rewards            shaped token rewards, missing end of sequence
    policy_loss        clipped surrogate, positive-example NLL
    value_loss         squared error of the critic, with or without value clipping
    preference_loss    Bradley-Terry
    supervised_loss    negative log-likelihood of given tokens
    aggregation        the four means over tokens and sequences, and their denominators
    diagnostics        explained variance and what must stand beside it
    metrics            sums and counts that add up over micro-batches and ranks
    masking            the one way in which masks are checked and applied
"""

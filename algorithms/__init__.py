"""The maths of RLHF: tensors and floats in, tensors out; torch is the only import.

Shapes are `B` sequences, `T` response tokens (right-padded) and `V` vocabulary. A mask is boolean, True on
response tokens including the end of sequence; values outside it, even NaN, change neither result nor
gradient.

    advantages         GAE, returns to go, group and greedy baselines, length-adaptive λ, whitening
    kl                 KL(π‖ref) and KL(old‖new), estimated from sampled tokens or exact; adaptive coefficients
    rewards            shaped token rewards, running moments and scaling, missing end of sequence, overlength
    policy_loss        clipped surrogate of tokens or responses, with or without dual clip, plain policy gradient, positive-example NLL
    bounded_ratio      clipped weight (CISPO), soft gate (SAPO), geometric mean of clipped ratios (GMPO)
    covariance         tokens of a large covariance of log-probability and advantage (Clip-Cov, KL-Cov)
    entropy_control    the adaptive coefficient of the entropy bonus
    kl_loss            KL to the reference, or to the policy that sampled, as a term of the loss
    value_loss         squared error of the critic, with or without value clipping
    preference_loss    Bradley-Terry, on pairs and on rankings with ties; centring; DPO
    pair_losses        IPO, SimPO and ORPO: other losses of a policy on pairs
    kto_loss           KTO: the loss of a policy on single responses that are desirable or not
    supervised_loss    negative log-likelihood of given tokens
    aggregation        the four means over tokens and sequences, and their denominators
    diagnostics        explained variance and the measures to read with it
    critic_slices      explained variance by part of the response, tokens left, length and difficulty
    critic_quality     by prompt, calibration, order within a prompt, and other baselines on the same tokens
    uncertainty        standard errors of measurements whose rows come in clusters, as the responses to one prompt do
    response_statistics  of several responses to a prompt: one of k right, distinct n-grams
    length_control     the win rate that a logistic regression predicts for responses of equal length
    wins               which of two judgements is the higher, with ties as half a win
    calibration        a reward model's probabilities against what is preferred: reliability, Brier scores
    metrics            sums and counts that can be added over micro-batches and ranks
    masking            how all functions check and apply masks
    groups             which rows answer one prompt
"""

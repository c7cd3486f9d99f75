"""Parts that stages share when they sample from a policy: rollouts, groups, judges, the best policy so far."""

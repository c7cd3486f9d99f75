"""What the stages share that sample from a policy: rollouts, groups, judges, the best policy so far."""

"""Apps in service: the gateway before a paid model, feedback, takeovers by a trained model, the audit and removal of traffic."""

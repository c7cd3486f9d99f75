"""The built-in verifiers: each module has ``load``, which returns a function of a response and the row's answer.

A response of more than ``MAX_CHARACTERS`` characters is wrong. Where ``extract`` is given, the group of its last match is judged,
and a response without a match is wrong. A response that was cut off is judged by what there is of it. Each module describes what
it makes of an empty response, of digits and letters beyond ASCII, and of several answers.
"""

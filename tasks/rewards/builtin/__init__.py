"""The built-in verifiers: each module has ``load``, which returns a function of a response and the row's answer.

A response of more than ``MAX_CHARACTERS`` characters is wrong. Where ``extract`` is given, the group of its last match is judged,
and a response without a match is wrong. Of a response that was cut off, the existing part is judged. Each module
describes how it judges an empty response, digits and letters beyond ASCII, and several answers.
"""

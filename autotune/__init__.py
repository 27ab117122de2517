"""The tuner: measures a real ring attention module on this machine and writes its hardware profile.

Imports ``ringattn``; never the other way round. Heavy imports (torch, optuna) happen inside the functions that
need them, so that ``from autotune.probe.request import ProbeRequest`` stays cheap.
"""

"""Turns a workload and a profile into a plan, or into the reasons against one."""

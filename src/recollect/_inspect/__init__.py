"""What looks at a step and changes nothing: profile, report, explain, print_saved, on_oom."""

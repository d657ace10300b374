//! GPUs, drives and what lies on them.

use shimmer_worker::budget::Size;

use super::{ContainerFacts, DriveFacts, Finding, GpuFacts};

/// Below this a drive is no NVMe: experts that do not fit into memory cost seconds per token.
const SLOW_GB_PER_S: f64 = 0.5;

pub(super) fn gpu(gpu: &GpuFacts) -> Vec<Finding> {
    const CHECK: &str = "gpu";
    let devices = gpu.devices.len();
    vec![match (&gpu.driver, devices, &gpu.library) {
        (Ok(None), 0, Err(_)) => {
            Finding::note(CHECK, "no NVIDIA driver: experts live in RAM and on drives")
        }
        (Ok(None), 0, Ok(())) => {
            Finding::warn(CHECK, "libcuda is here, the driver's kernel module is not")
                .fix("modprobe nvidia; where there is no GPU, this is harmless")
        }
        (Ok(Some(driver)), 0, _) => {
            Finding::warn(CHECK, format!("driver {driver}, but no device file /dev/nvidia0"))
                .fix("docker run --gpus all, or resources.limits nvidia.com/gpu in Kubernetes")
        }
        (_, devices, Err(why)) => {
            Finding::warn(CHECK, format!("{devices} devices, but libcuda does not load: {why}"))
                .fix("NVIDIA_DRIVER_CAPABILITIES=compute,utility, or apt install libcuda1")
        }
        (Ok(driver), devices, Ok(())) => {
            let driver = driver.as_deref().unwrap_or("of unknown version");
            Finding::ok(CHECK, format!("{devices} devices, driver {driver}, libcuda loads"))
        }
        (Err(why), devices, Ok(())) => Finding::note(
            CHECK,
            format!(
                "{devices} devices, libcuda loads; the driver's version could not be read: {why}"
            ),
        ),
    }]
}

pub(super) fn drive(drive: &DriveFacts) -> Vec<Finding> {
    let mut findings = vec![match (&drive.uring, &drive.uring_disabled) {
        (Ok(()), _) => Finding::ok("io_uring", "can be used: --io uring"),
        (Err(_), Ok(mode @ 1..)) => Finding::note(
            "io_uring",
            format!("off for processes like this one (kernel.io_uring_disabled is {mode}): --io pread works"),
        )
        .fix("sysctl -w kernel.io_uring_disabled=0"),
        (Err(why), _) => Finding::note("io_uring", format!("refused ({why}): --io pread works"))
            .fix("docker run --security-opt seccomp=PROFILE with io_uring_setup, _enter, _register"),
    }];
    let Some(path) = &drive.path else {
        findings.push(
            Finding::note("drive", "not looked at").fix("give --container DIR or --disk DIR"),
        );
        return findings;
    };
    if let Some(name) = drive.network {
        let found = format!("{path} lies on {name}: every miss of an expert crosses the network");
        findings.push(
            Finding::warn("file system", found)
                .fix("shimmer mirror stage CONTAINER LOCAL-DIR, then worker --mirror LOCAL-DIR"),
        );
    }
    findings.extend(drive.direct.iter().map(|direct| {
        match direct {
            Ok(alignment) => Finding::ok("O_DIRECT", format!("in steps of {alignment} bytes")),
            Err(why) => {
                Finding::warn("O_DIRECT", format!("{path}: {why}; reads fill the page cache"))
                    .fix("put the container on ext4 or XFS, not on tmpfs or an overlay")
            }
        }
    }));
    findings.extend(drive.speed.iter().map(|speed| speed_of(path, speed)));
    findings
}

fn speed_of(path: &str, speed: &super::Known<shimmer_worker::io::probe::Speed>) -> Finding {
    const CHECK: &str = "drive speed";
    let speed = match speed {
        Ok(speed) => speed,
        Err(why) => {
            return Finding::fail(CHECK, format!("{path}: {why}")).fix(
                "give --disk a directory that is there and takes a file of 64 MiB, --container one that this user may read",
            );
        }
    };
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let rate = speed.bytes as f64 / speed.seconds.max(1e-9) / 1e9;
    let read = Size(speed.bytes);
    if !speed.direct {
        let found =
            format!("{rate:.2} GB/s over {read} through the page cache, which may be its speed");
        return Finding::note(CHECK, found);
    }
    let found = format!("{rate:.2} GB/s over {read}");
    if rate < SLOW_GB_PER_S {
        return Finding::warn(CHECK, format!("{found}: slow for experts that do not fit into RAM"))
            .fix(
                "put the container on NVMe, or see `shimmer plan` whether all of it fits into RAM",
            );
    }
    Finding::ok(CHECK, found)
}

pub(super) fn container(container: &ContainerFacts) -> Vec<Finding> {
    const CHECK: &str = "container";
    let path = &container.path;
    let opened = match &container.opened {
        Ok(opened) => opened,
        Err(why) => {
            let fix = if container.there {
                format!("shimmer verify {path}; convert or copy the named files again")
            } else {
                "give --container the directory with manifest.json that `shimmer convert` wrote"
                    .to_owned()
            };
            return vec![Finding::fail(CHECK, why.clone()).fix(fix)];
        }
    };
    let found = format!(
        "{} files and the manifest agree in names and sizes, {} of experts, digest {}",
        opened.files,
        Size(opened.expert_bytes),
        opened.digest.get(..12).unwrap_or(&opened.digest)
    );
    let mut findings = vec![match opened.absent_layers {
        0 => Finding::ok(CHECK, found),
        layers => Finding::note(CHECK, format!("{found}; {layers} layers have no file here")),
    }];
    findings.push(match &container.verified {
        None => Finding::note("contents", "not hashed")
            .fix(format!("shimmer doctor --container {path} --full")),
        Some(Ok((bytes, faults))) => match faults.first() {
            None => Finding::ok("contents", format!("{} are as the manifest says", Size(*bytes))),
            Some(first) => {
                Finding::fail("contents", format!("{} faults, the first: {first}", faults.len()))
                    .fix("remove the named file and copy or convert it again")
            }
        },
        Some(Err(why)) => Finding::fail("contents", why.clone())
            .fix(format!("let this user read every file of {path}, then shimmer verify {path}")),
    });
    findings.push(match &container.fits {
        Ok(thousandths) => Finding::ok(
            "plan",
            format!(
                "as the only worker this host keeps {}.{} % of the experts in memory from the start",
                thousandths / 10,
                thousandths % 10
            ),
        ),
        Err(why) => Finding::fail("plan", why.clone()).fix(format!("shimmer plan --container {path}")),
    });
    findings
}

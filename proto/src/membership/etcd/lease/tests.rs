use super::*;

const TTL: Duration = Duration::from_secs(9);

fn secs(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

fn held(start: Instant) -> Lease {
    let mut lease = Lease::new(TTL, start, 1);
    assert_eq!((lease.action(), lease.due()), (Action::Grant, start));
    lease.granted(7, TTL, start);
    lease
}

#[test]
fn renewals_count_from_when_they_were_sent() {
    let start = Instant::now();
    let mut lease = held(start);
    assert_eq!((lease.action(), lease.due()), (Action::Renew(7), start + secs(3.0)));
    // Sent at 3 s; whenever the answer comes, the lease may run out at 12 s.
    lease.renewed(start + secs(3.0));
    assert_eq!(lease.due(), start + secs(6.0));
    assert_eq!(lease.confirmed(start + secs(11.9)), Some(7));
    assert_eq!(lease.confirmed(start + secs(12.0)), None);
    // An answer that arrives out of order shortens nothing.
    lease.renewed(start + secs(1.0));
    assert_eq!(lease.expires(), Some(start + secs(12.0)));
}

#[test]
fn tries_that_time_out_still_leave_several_before_the_expiry() {
    for seed in 0..100 {
        let start = Instant::now();
        let mut lease = Lease::new(TTL, start, seed);
        lease.granted(7, TTL, start);
        let (mut now, mut tries) = (lease.due(), 0);
        while now < start + TTL {
            tries += 1;
            now += TTL / 5;
            lease.failed(now);
            now = lease.due();
        }
        assert!(tries >= 3, "{tries} tries with seed {seed}");
    }
}

#[test]
fn tries_that_fail_at_once_are_not_a_flood() {
    let start = Instant::now();
    let mut lease = held(start);
    let (mut now, mut tries) = (lease.due(), 0);
    while now < start + TTL * 100 {
        tries += 1;
        lease.failed(now);
        now = lease.due();
    }
    assert!(tries < 1000, "{tries} tries in {:?}", TTL * 100);
    assert_eq!(lease.action(), Action::Renew(7), "only the store can say that it is gone");
}

#[test]
fn a_lost_lease_is_asked_for_at_once_and_a_stale_loss_is_ignored() {
    let start = Instant::now();
    let mut lease = held(start);
    lease.lost(6, start + secs(1.0));
    assert_eq!(lease.action(), Action::Renew(7));
    lease.lost(7, start + secs(1.0));
    assert_eq!((lease.action(), lease.due()), (Action::Grant, start + secs(1.0)));
    assert_eq!(lease.confirmed(start + secs(1.0)), None);
}

#[test]
fn a_store_that_is_back_is_asked_at_once() {
    let start = Instant::now();
    let mut lease = held(start);
    lease.retry(start + secs(1.0));
    assert_eq!(lease.due(), start + secs(1.0));
    lease.renewed(start + secs(1.0));
    lease.retry(start + secs(8.0));
    assert_eq!(lease.due(), start + secs(4.0));
}

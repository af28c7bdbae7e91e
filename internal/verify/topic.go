package verify

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"time"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/money"
)

// Topic is the topic ledger.balances, which the role balances keeps.
type Topic struct {
	// Behind is how many events the role has not taken in.
	Behind func(ctx context.Context) (int64, error)
	// Read is what the topic says.
	Read func(ctx context.Context) (balances.Totals, error)
}

// topic compares the balances on the topic with the ledger's, by tenant, account
// and currency. They are comparable when all that billing has committed is on
// billing.events and taken in from there, and when the ledger has not moved
// meanwhile; it waits for that as long as it may. A difference has to be seen
// twice: the topic can be ahead of what a snapshot shows, for a moment.
func (r *run) topic(ctx context.Context) error {
	if r.Topic == nil {
		return nil
	}
	if r.deadline.IsZero() {
		r.deadline = time.Now().Add(r.Wait)
	}
	differs := false
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		settled, again, why, err := r.compare(ctx, differs)
		if err != nil || settled {
			return err
		}
		differs = again
		if !differs && !time.Now().Before(r.deadline) {
			r.report.Topic = TopicReport{State: TopicBehind}
			r.report.note("The balances on the topic ledger.balances were not compared: %s.", why)
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// compare looks once. settled says that the report has the outcome, again that
// there was a difference that counts if it is still there next time.
func (r *run) compare(ctx context.Context, counts bool) (settled, again bool, why string, err error) {
	before, err := r.ledgerBalances(ctx)
	if err != nil {
		return false, false, "", err
	}
	var mark watermark
	published, err := r.relayPassed(ctx, &mark)
	if err != nil {
		return false, false, "", fmt.Errorf("ask how far the relay is: %w", err)
	}
	if !published {
		return false, false, "billing's events are not all published", nil
	}
	behind, err := r.Topic.Behind(ctx)
	if err != nil {
		return false, false, fmt.Sprintf("Kafka could not be asked: %v", err), ctx.Err()
	}
	if behind > 0 {
		return false, false, fmt.Sprintf("they are behind by %d", behind), nil
	}
	totals, err := r.Topic.Read(ctx)
	if err != nil {
		return false, false, fmt.Sprintf("the topic could not be read: %v", err), ctx.Err()
	}
	after, err := r.ledgerBalances(ctx)
	if err != nil {
		return false, false, "", err
	}
	if !maps.EqualFunc(before, after, func(a, b *big.Int) bool { return a.Cmp(b) == 0 }) {
		return false, false, "the ledger does not stand still", nil
	}
	findings := differences(after, totals.Accounts)
	if len(findings) > 0 && !counts {
		return false, true, "", nil
	}
	r.report.Topic = TopicReport{State: TopicEqual, Accounts: int64(len(totals.Accounts))}
	if len(findings) > 0 {
		r.report.Topic.State = TopicDiffers
	}
	r.report.add(findings...)
	for partition, first := range totals.Begun {
		r.report.note("The balances from partition %d of billing.events begin at offset %d: earlier events were gone by the topic's retention.", partition, first)
	}
	return true, false, "", nil
}

func (r *run) ledgerBalances(ctx context.Context) (map[balances.Account]*big.Int, error) {
	rows, err := r.queries.VerifyLedgerBalances(ctx, r.DB)
	if err != nil {
		return nil, fmt.Errorf("sum the ledger: %w", err)
	}
	sums := make(map[balances.Account]*big.Int, len(rows))
	for _, row := range rows {
		sum, ok := new(big.Int).SetString(row.BalanceMinor, 10)
		if !ok {
			return nil, fmt.Errorf("sum the ledger: the sum of account %s is %q", row.Account, row.BalanceMinor)
		}
		sums[balances.Account{TenantID: row.TenantID, Code: row.Account, Currency: money.Currency(row.Currency)}] = sum
	}
	return sums, nil
}

// differences are the accounts that are not on the topic what they are in the
// ledger, in order.
func differences(ledger, topic map[balances.Account]*big.Int) []Finding {
	all := maps.Clone(ledger)
	maps.Copy(all, topic)
	keys := slices.SortedFunc(maps.Keys(all), func(a, b balances.Account) int {
		return cmp.Or(bytes.Compare(a.TenantID[:], b.TenantID[:]), cmp.Compare(a.Code, b.Code), cmp.Compare(a.Currency, b.Currency))
	})
	text := func(sum *big.Int, currency money.Currency) string {
		if sum == nil {
			return "not there"
		}
		return decimalText(sum.String(), string(currency)) + " " + string(currency)
	}
	var findings []Finding
	for _, key := range keys {
		inLedger, onTopic := ledger[key], topic[key]
		if inLedger == nil || onTopic == nil || inLedger.Cmp(onTopic) != 0 {
			findings = append(findings, Finding{Kind: TopicBalance, TenantID: key.TenantID, Detail: fmt.Sprintf(
				"%s in %s is %s on the topic, %s in the ledger", key.Code, key.Currency, text(onTopic, key.Currency), text(inLedger, key.Currency))})
		}
	}
	return findings
}
